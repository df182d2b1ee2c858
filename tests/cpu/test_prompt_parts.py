"""Parts of prompts and marked parts of messages: what requests may say, where parts stand, and chat templates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import MessageProcessingResult
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sgl_prefill.config import PrefillConfig
from sgl_prefill.core.prompt_parts import KEEPS
from sgl_prefill.errors import BadRequestError
from sgl_prefill.http import conversations
from sgl_prefill.http.cut_requests import CutRequests
from sgl_prefill.http.parted_requests import PartTokenizer
from sgl_prefill.http.protocol import (
    LabelChatCompletionRequest,
    LabelCompletionRequest,
    LabelGenerateReqInput,
    marks_of,
)
from sgl_prefill.http.request_checks import CUT_CHARACTERS_PER_TOKEN
from sgl_prefill.http.tokenizer_manager import PrefillTokenizerManager

LONGEST_INPUT_TOKENS = 60
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[answer]"


def fast_tokenizer(*, adds: bool = True) -> Any:
    """Byte-level with a few merges; offsets leave blanks out as Llama 3's do, and a text gets a beginning and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġ", "Ġ"), ("Ċ", "Ċ")]
    vocabulary = [*letters, *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    special = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    if adds:
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special),
            ]
        )
    made: Any = PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Manager(PrefillTokenizerManager):
    """As much of one as cutting takes."""

    def __init__(self, tokenizer: Any = None, *, is_multimodal: bool = False) -> None:
        self.tokenizer, self.mm_processor = tokenizer, None
        self.model_config = SimpleNamespace(vocab_size=300, is_multimodal=is_multimodal)
        self.prefill_config = PrefillConfig()
        self.max_req_input_len, self.context_len = LONGEST_INPUT_TOKENS + 1, 4096
        self.async_dynamic_batch_tokenizer = None


class Serving:
    """Fills chat templates as SGLang does."""

    def __init__(self, manager: Any, completion_template_name: str | None = None) -> None:
        self.tokenizer_manager = manager
        self.template_manager = SimpleNamespace(completion_template_name=completion_template_name)
        self.n_filled = 0

    def _process_messages(self, request: Any) -> MessageProcessingResult:
        self.n_filled += 1
        messages = [message.model_dump() for message in request.messages]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = " ".join(part["text"] for part in message["content"])
        tokenizer = self.tokenizer_manager.tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return MessageProcessingResult(
            prompt="", prompt_ids=ids, image_data=None, video_data=None, audio_data=None, modalities=[], stop=[]
        )

    def _convert_to_internal_request(self, request: Any, raw_request: Any) -> Any:
        return conversations.around_process_messages(type(self)._process_messages, self, request)


TOKENIZER = fast_tokenizer()


def completion(**body: Any) -> LabelCompletionRequest:
    request: LabelCompletionRequest = LabelCompletionRequest.model_validate({"model": "demo", **body})
    return request


def chat(*messages: dict[str, Any], **body: Any) -> LabelChatCompletionRequest:
    request: LabelChatCompletionRequest = LabelChatCompletionRequest.model_validate(
        {"model": "demo", "messages": list(messages), **body}
    )
    return request


def turn(content: Any, **keep: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keep}


def text(said: str, **keep: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **keep}


def cut_completion(body: dict[str, Any], manager: Any = None, **serving: Any) -> tuple[Any, Any]:
    manager, request = manager or Manager(TOKENIZER), completion(**body)
    parts = asyncio.run(CutRequests(manager).of_completion(Serving(manager, **serving), request))
    return request.prompt, parts


def cut_chat(request: LabelChatCompletionRequest, manager: Any = None) -> tuple[list[int], Any]:
    async def run() -> tuple[list[int], Any]:
        serving = Serving(manager or Manager(TOKENIZER))
        parts = await CutRequests(serving.tokenizer_manager).of_chat(serving, request, None)
        n_filled = serving.n_filled
        ids = serving._convert_to_internal_request(request, None).prompt_ids
        assert (serving.n_filled > n_filled) == (parts is None), "what was cut is not filled again"
        return ids, parts

    return asyncio.run(run())


def refused(work: Callable[[], Any], *told: str) -> None:
    with pytest.raises((BadRequestError, ValueError)) as caught:
        work()
    for words in told:
        assert words in str(caught.value)


@given(st.lists(st.text("ab c\n日🎉é", max_size=6), max_size=8).map("".join), st.booleans())
def test_a_text_is_tokenised_as_the_server_does_and_offsets_leave_no_gap(said: str, adds: bool) -> None:
    tokens = PartTokenizer(TOKENIZER).encode(said, adds)
    assert [*tokens.before, *tokens.ids, *tokens.after] == TOKENIZER.encode(said, add_special_tokens=adds)
    assert len(tokens.before) + len(tokens.after) == (2 if adds else 0)
    assert not said or len(tokens.before) == len(tokens.after)
    ends = [0, *(end for _, end in tokens.offsets)]
    assert all(start <= end for (start, _), end in zip(tokens.offsets, ends, strict=False))
    assert ends[-1] == len(said)


@given(
    st.lists(st.tuples(st.text("abc \n日🎉e\u0301", max_size=25), st.sampled_from(KEEPS)), min_size=1, max_size=6),
    st.integers(1, LONGEST_INPUT_TOKENS),
)
def test_prompts_are_cut_where_they_are_refused_else(parts: list[tuple[str, Any]], most: int) -> None:
    """Texts are drawn; whatever fits goes on as its own tokens, and the text of kept parts stands in what is left."""
    given_parts = [{"text": said, "keep": keep} for said, keep in parts]
    whole = "".join(said for said, _ in parts)
    if not whole:
        refused(lambda: cut_completion({"prompt_parts": given_parts}), "prompt_parts holds no text")
        return
    uncut = TOKENIZER.encode(whole)
    body = {"prompt_parts": given_parts, "max_prompt_tokens": most}
    if len(uncut) <= most:
        for on_overflow in ("refuse", "cut"):
            ids, (told,) = cut_completion({**body, "on_overflow": on_overflow})
            assert ids == uncut
            assert not any(part["cut_tokens"] for part in told)
        return
    refused(
        lambda: cut_completion(body), f"has {len(uncut)} tokens", f"max_prompt_tokens allows at most {most}", '"cut"'
    )
    try:
        ids, (told,) = cut_completion({**body, "on_overflow": "cut"})
    except BadRequestError:
        refused(
            lambda: cut_completion({**body, "on_overflow": "cut"}),
            f"tokens cannot be cut, and max_prompt_tokens allows at most {most}",
        )
        return
    assert len(ids) <= most
    assert sum(part["cut_tokens"] for part in told) == len(uncut) - len(ids)
    left, place = TOKENIZER.decode(ids[1:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False), 0
    assert "\ufffd" not in left
    for (said, keep), part in zip(parts, told, strict=True):
        if keep is True:
            place = left.index(said, place) + len(said)
            assert part["cut_tokens"] == 0


def test_several_prompts_are_cut_each_by_itself() -> None:
    long, short = [{"text": "b" * 99, "keep": "end"}, {"text": "?"}], [{"text": "b"}]
    prompts, parts = cut_completion({"prompt_parts": [long, short], "on_overflow": "cut"})
    assert list(map(len, prompts)) == [LONGEST_INPUT_TOKENS, 3]
    assert parts == [
        [{"kept_tokens": 57, "cut_tokens": 42}, {"kept_tokens": 1, "cut_tokens": 0}],
        [{"kept_tokens": 1, "cut_tokens": 0}],
    ]
    obj = LabelGenerateReqInput(prompt_parts=long, on_overflow="cut")
    assert asyncio.run(CutRequests(Manager(TOKENIZER)).of_generate(obj)) == parts[:1]
    assert obj.input_ids == prompts[0]


ONE = [{"text": "a b"}]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt_parts": []}, ["prompt_parts is empty", "at least one part"]),
        ({"prompt_parts": [[{"text": "a"}], []]}, ["prompt_parts[1] is empty"]),
        ({"prompt_parts": [{"text": ""}]}, ["prompt_parts holds no text"]),
        ({"prompt_parts": "a"}, ["prompt_parts is str", "list"]),
        ({"prompt_parts": [[{"text": "a"}], {"text": "a"}]}, ["prompt_parts[1] is no list", "one list for each"]),
        (
            {"prompt_parts": [{"text": "a", "keep": "stat"}]},
            ["prompt_parts[0].keep is 'stat'", '"start", "end" or "middle"'],
        ),
        ({"prompt_parts": [{"text": "a", "keep": False}]}, ["prompt_parts[0].keep is False", "true"]),
        ({"prompt_parts": [{"text": "a", "kepe": True}]}, ["prompt_parts[0] holds 'kepe'"]),
        ({"prompt_parts": [{"keep": "start"}]}, ["prompt_parts[0] is no part"]),
        ({"prompt_parts": ONE * 4097}, ["prompt_parts has 4097 parts", "4096"]),
        ({"prompt_parts": [ONE] * 10_001}, ["10001 prompts", "limit is 10000"]),
        ({"prompt_parts": [{"text": "\ud800"}]}, ["surrogates"]),
        ({"prompt_parts": ONE, "prompt": "a"}, ["prompt and prompt_parts are both given"]),
        ({"prompt_parts": ONE, "on_overflow": "trim"}, ["on_overflow is 'trim'", '"refuse"', '"cut"']),
        ({"prompt_parts": ONE, "max_prompt_tokens": 61}, ["max_prompt_tokens is 61", "from 1 to 60"]),
        ({"prompt_parts": ONE, "max_prompt_tokens": 0}, ["max_prompt_tokens is 0"]),
        ({"prompt_parts": ONE, "max_prompt_tokens": True}, ["max_prompt_tokens is True"]),
        ({"prompt": "a", "on_overflow": "cut"}, ["on_overflow is 'cut'", "give prompt_parts in the place of prompt"]),
        ({"prompt": "a", "max_prompt_tokens": 5}, ["max_prompt_tokens is 5", "prompt_parts"]),
        (
            {"prompt_parts": [{"text": "b" * 70}, {"text": "bbb", "keep": "end"}], "on_overflow": "cut"},
            ["prompt_parts: 72 of the prompt's 75 tokens cannot be cut", "this server takes at most 60", '"keep"'],
        ),
        (
            {"prompt_parts": [{"text": "b" * 3841, "keep": "start"}], "on_overflow": "cut"},
            ["3841 characters", f"may have {60 * CUT_CHARACTERS_PER_TOKEN}, {CUT_CHARACTERS_PER_TOKEN} for each"],
        ),
    ],
)
def test_what_no_prompt_is_cut_for(body: dict[str, Any], told: list[str]) -> None:
    refused(lambda: cut_completion(body), *told)


def test_servers_that_cannot_cut_say_so() -> None:
    body = {"prompt_parts": ONE}
    refused(lambda: cut_completion(body, Manager()), "without a tokenizer", "prompt_parts", "token ids, at most 60")
    refused(lambda: cut_completion(body, Manager(object())), "object", "does not say where a token stands")
    refused(lambda: cut_completion(body, completion_template_name="fim"), "--completion-template")
    changing = fast_tokenizer()
    changing.encode = lambda said, **_: [5]
    refused(lambda: cut_completion(body, Manager(changing)), "changes texts before")
    given_twice = LabelGenerateReqInput(prompt_parts=ONE, input_ids=[5])
    refused(lambda: asyncio.run(CutRequests(Manager(TOKENIZER)).of_generate(given_twice)), "input_ids and prompt_parts")


@pytest.mark.parametrize(("most", "n_dropped"), [(51, 1), (50, 2), (40, 2), (29, 3)])
def test_the_oldest_marked_messages_are_dropped_until_the_chat_fits(most: int, n_dropped: int) -> None:
    """No more of them than needed; what stays is the prompt of a chat without them."""
    droppable, fixed = [turn(str(index) * 5, keep=False) for index in range(3)], turn("Yes?", keep=True)
    messages = [turn("Read:"), *droppable[:2], fixed, droppable[2]]
    ids, [parts] = cut_chat(chat(*messages, on_overflow="cut", max_prompt_tokens=most))
    left = [message for message in messages if message not in droppable[:n_dropped]]
    same, none = cut_chat(chat(*({**message, "keep": True} for message in left)))
    assert len(ids) <= most
    assert ids == same
    assert not any(part["dropped"] for part in none[0])
    dropped = [{"message": index, "dropped": place < n_dropped} for place, index in enumerate((1, 2, 4))]
    assert parts == sorted([*dropped, {"message": 3, "dropped": False}], key=lambda part: part["message"])


def test_a_chat_that_fits_is_as_without_marks() -> None:
    plain, marked = chat(turn("abc a"), turn("b")), chat(turn("abc a", keep=False), turn("b"))
    (ids, none), (same_ids, parts) = cut_chat(plain), cut_chat(marked)
    assert none is None
    assert ids == same_ids
    assert parts == [[{"message": 0, "dropped": False}]]


@pytest.mark.parametrize(
    ("messages", "body", "told"),
    [
        ([turn("abc", keep="start")], {}, ["messages[0].keep is 'start'", "false"]),
        ([turn([text("abc", keep="end")])], {}, ["messages[0].content[0] has keep", "whole messages"]),
        (
            [turn("b" * 70), turn("a", keep=False)],
            {"on_overflow": "cut"},
            ["without the 1 messages", "still has 84 tokens", "at most 60", '"keep": false'],
        ),
        ([turn("b" * 70, keep=False)], {}, ["has 84 tokens", "at most 60", '"on_overflow": "cut"']),
        ([turn("b" * 70, keep=False)], {"on_overflow": "cut"}, ["messages is empty"]),
        ([turn("abc")], {"on_overflow": "cut"}, ["on_overflow is 'cut'", '"keep": false']),
        ([turn("abc")], {"prompt_parts": ONE}, ["prompt_parts is for prompts", '"keep": false']),
        ([turn("a", keep=False)], {"input_ids": [5]}, ["input_ids cannot be combined with messages[0].keep"]),
        ([turn("a", keep=False)], {"continue_final_message": True}, ["continue_final_message"]),
    ],
)
def test_what_no_chat_is_cut_for(messages: list[dict[str, Any]], body: dict[str, Any], told: list[str]) -> None:
    refused(lambda: cut_chat(chat(*messages, **body)), *told)


def test_a_model_that_takes_images_refuses_marks() -> None:
    refused(lambda: cut_chat(chat(turn("a", keep=False)), Manager(TOKENIZER, is_multimodal=True)), "takes images")


@pytest.mark.parametrize(
    "body", [None, [], {}, {"messages": 1}, {"messages": [1, {"content": "a"}, {"content": [1, {}]}]}]
)
def test_a_body_of_another_shape_has_no_marks(body: Any) -> None:
    assert marks_of(body) == ()
