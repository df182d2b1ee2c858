"""`prompt_parts`, `on_overflow` and `max_prompt_tokens`: validation, tokenisation with offsets, and cutting."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefill.core.prompt_parts import KEEPS, CannotCutError, Cut, Span, cut
from sgl_prefill.errors import BadRequestError

if TYPE_CHECKING:
    pass

REFUSE, CUT = "refuse", "cut"
MOST_PARTS = 4_096  # of one prompt
SHOWN = "prompt_parts"  # in meta_info and in label_scores
# If the tokenizer and `PartTokenizer` encode this text alike, they are assumed to agree on every text.
SAMPLE = "  Two blanks,\tone tab.\n\nA Ünïcode line: 日本 🎉 e\u0301 1234 <|im_end|></s>\r\n it's"


class Limit(NamedTuple):
    """The longest prompt of a request."""

    tokens: int
    name: str  # for error messages
    cuts: bool  # whether longer prompts are cut or refused


class PartedPrompt(NamedTuple):
    text: str  # of all parts
    spans: list[Span]  # one per part, in characters


class Tokens(NamedTuple):
    before: list[int]  # added by the tokenizer, such as a begin-of-sequence token
    ids: list[int]
    offsets: list[tuple[int, int]]  # of each of `ids`, in characters
    after: list[int]  # added by the tokenizer


class CutPrompt(NamedTuple):
    token_ids: list[int]  # fit the limit
    cut: Cut


def limit_of(request: Any, longest_input_tokens: int) -> Limit:
    """Parses `on_overflow` and `max_prompt_tokens`. Raises BadRequestError."""
    on_overflow, most = request.on_overflow, request.max_prompt_tokens
    if on_overflow not in (None, REFUSE, CUT):
        raise BadRequestError(f'on_overflow is {on_overflow!r}: it must be "{REFUSE}", the default, or "{CUT}"')
    cuts = on_overflow == CUT
    if most is None:
        return Limit(longest_input_tokens, "this server takes", cuts)
    if type(most) is not int or not 1 <= most <= longest_input_tokens:
        raise BadRequestError(
            f"max_prompt_tokens is {most!r}: it must be a number from 1 to {longest_input_tokens}, the longest prompt that this"
            " server takes"
        )
    return Limit(most, "max_prompt_tokens allows", cuts)


def check_no_cut_options(request: Any, remedy: str) -> None:
    """Raises BadRequestError for cut options in a request without parts."""
    for name in ("on_overflow", "max_prompt_tokens"):
        if (value := getattr(request, name)) is not None:
            raise BadRequestError(f"{name} is {value!r}, and nothing says what may be cut: {remedy}, or leave it out")


def prompts_of(given: Any) -> dict[str, PartedPrompt]:
    """Parses `prompt_parts`, the parts of one prompt or a list of such lists, by the name of the field in error messages. Raises
    BadRequestError."""
    if not isinstance(given, list):
        raise BadRequestError(
            f"prompt_parts is {type(given).__name__}: it must be a list of parts, or a list of such lists"
        )
    lists = {f"prompt_parts[{index}]": one for index, one in enumerate(given)}
    return {
        name: _prompt_of(one, name) for name, one in (lists if is_batch(given) else {"prompt_parts": given}).items()
    }


def is_batch(given: list[Any]) -> bool:
    return bool(given) and isinstance(given[0], list)


def _prompt_of(given: Any, where: str) -> PartedPrompt:
    if not isinstance(given, list):
        raise BadRequestError(f"{where} is no list of parts, and others beside it are: give one list for each prompt")
    if len(given) > MOST_PARTS:
        raise BadRequestError(f"{where} has {len(given)} parts, and {MOST_PARTS} are the limit: join some of them")
    spans, start = list[Span](), 0
    for index, part in enumerate(given):
        name = f"{where}[{index}]"
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise BadRequestError(f'{name} is no part: give {{"text": ..., "keep": ...}}')
        if unknown := part.keys() - {"text", "keep"}:
            raise BadRequestError(f"{name} holds {min(unknown)!r}: a part has text and keep")
        keep = part.get("keep", True)
        if not isinstance(keep, (bool, str)) or keep not in KEEPS:
            raise BadRequestError(
                f'{name}.keep is {keep!r}: it must be true (all of it is kept), "start", "end" or "middle" (the side that is'
                " kept)"
            )
        spans.append(Span(start, start + len(part["text"]), keep))  # type: ignore[arg-type]
        start = spans[-1].end
    if start == 0:
        what = "is empty" if not given else "holds no text"
        raise BadRequestError(f"{where} {what}: give at least one part with a text")
    return PartedPrompt("".join(part["text"] for part in given), spans)


class PartTokenizer:
    """Tokenises texts as the server does, with offsets. Not thread-safe. Raises BadRequestError if there are no offsets."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise BadRequestError(
                f"this server's tokenizer ({type(tokenizer).__name__}) does not say where a token stands in a text, which cutting"
                " prompts needs: send them shortened, without prompt_parts"
            )
        self._whole = copy.deepcopy(backend)
        self._whole.no_padding()
        self._whole.no_truncation()
        self._bare = copy.deepcopy(self._whole)
        self._bare.post_processor = None  # it may leave blanks out of offsets
        for adds in (True, False):
            found = self.encode(SAMPLE, adds)
            if list(tokenizer.encode(SAMPLE, add_special_tokens=adds)) != [*found.before, *found.ids, *found.after]:
                raise BadRequestError(
                    f"this server's tokenizer ({type(tokenizer).__name__}) changes texts before it tokenises them, so that"
                    " offsets are unknown: send prompts shortened, without prompt_parts"
                )

    def encode(self, text: str, add_special_tokens: bool = True) -> Tokens:
        try:
            bare = self._bare.encode(text, add_special_tokens=False)
        except TypeError as error:  # a lone surrogate
            raise BadRequestError("the prompt holds a text that is no Unicode: leave lone surrogates out") from error
        whole = self._whole.post_process(bare, None, add_special_tokens)
        n_before = next((place for place, added in enumerate(whole.special_tokens_mask) if not added), 0)
        n_end = n_before + len(bare.ids)
        return Tokens(whole.ids[:n_before], bare.ids, bare.offsets, whole.ids[n_end:])


def cut_prompt(tokens: Tokens, spans: Sequence[Span], limit: Limit, name: str) -> CutPrompt:
    """Raises BadRequestError if the prompt does not fit. name: of the field, for error messages."""
    n_added = len(tokens.before) + len(tokens.after)
    n_tokens = n_added + len(tokens.ids)
    if n_tokens > limit.tokens and not limit.cuts:
        raise BadRequestError(
            f"{name}: the prompt has {n_tokens} tokens, and {limit.name} at most {limit.tokens}: shorten it, or send"
            f' "on_overflow": "{CUT}" and say by "keep" what may be cut'
        )
    try:
        found = cut(tokens.offsets, spans, limit.tokens - n_added)
    except CannotCutError as error:
        n_fixed = n_added + error.fixed_tokens
        raise BadRequestError(
            f"{name}: {n_fixed} of the prompt's {n_tokens} tokens cannot be cut, and {limit.name} at most {limit.tokens}, of"
            " which one at least must be there: shorten what is kept whole, or let more parts be cut by"
            ' "keep": "start", "end" or "middle"'
        ) from error
    return CutPrompt([*tokens.before, *found.apply(tokens.ids), *tokens.after], found)


def attach_parts(obj: Any, of_prompts: list[list[dict[str, Any]]] | None) -> None:
    """Stores the reply's `prompt_parts` of each prompt in SGLang's request; None: a request without parts."""
    obj.sgl_prefill_parts = of_prompts


def show_parts(obj: Any, output: Any) -> None:
    """Copies the stored `prompt_parts` to `meta_info` of the outputs."""
    of_prompts = getattr(obj, "sgl_prefill_parts", None)
    if of_prompts is None:
        return
    n_samples = obj.parallel_sample_num or 1  # consecutive outputs per prompt
    for place, one in enumerate(output if isinstance(output, list) else [output]):
        index = place if isinstance(output, list) else one.get("index", 0)
        one["meta_info"][SHOWN] = of_prompts[index // n_samples]
