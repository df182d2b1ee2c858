"""OpenAI's client: labels, log-probabilities, batches with an error in a prompt's place, streams, vLLM's field names."""

from __future__ import annotations

import openai
from work import LABELS, MODEL, PROMPT, URL

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
(model,) = client.models.list()
labels = {"allowed_tokens": LABELS}
reply = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, extra_body=labels)
assert reply.model == model.id, "the model that answered"
alone = reply.choices[0]
assert alone.text == LABELS[0], alone
assert alone.logprobs is not None
assert alone.logprobs.text_offset == [0]
assert list(alone.logprobs.top_logprobs[0]) == LABELS
probabilities = [one["probability"] for one in alone.label_scores["labels"]]
assert abs(sum(probabilities) - 1) < 1e-6

batch = client.completions.create(model=MODEL, prompt=[PROMPT, "a " * 20_000, PROMPT], extra_body=labels).choices
assert [one.finish_reason for one in batch] == ["stop", "error", "stop"]
assert "prompt 1 has" in batch[1].error["message"]
assert [one["probability"] for one in batch[2].label_scores["labels"]] == probabilities

words = [label.strip() for label in LABELS]
messages = [{"role": "user", "content": PROMPT}]
for way in ({"allowed_tokens": words}, {"guided_choice": words}, {"structured_outputs": {"choice": words}}):
    with client.chat.completions.create(model=MODEL, messages=messages, stream=True, extra_body=way) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) in words
refused = ""
try:
    client.chat.completions.create(model=MODEL, messages=messages, extra_body={"allowed_token": words})
except openai.BadRequestError as error:
    refused = str(error)
assert "allowed_tokens" in refused, "a misspelt field was accepted"
