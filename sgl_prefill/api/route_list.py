"""Which of SGLang's routes a prefill-only server leaves out: one list, and a sentence for each. `--all-routes` brings them back
as SGLang has them."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request

OF_GENERATION = "it works on generated text, and this server's answers are one token"
OF_SPEECH = "it transcribes speech, which is generated text"
OF_SPECULATION = "it serves speculative decoding, and a prefill-only answer decodes nothing"
OF_TESTS = "it slows the server down, for tests of SGLang's"
OF_A_STORE = "there is no hierarchical cache behind the prefix cache"

OF_EXPERTS = "it records which experts a model uses, and ends a server that was not started to do so"

LEFT_OUT: dict[str, str] = {
    "/start_expert_distribution_record": OF_EXPERTS,
    "/stop_expert_distribution_record": OF_EXPERTS,
    "/dump_expert_distribution_record": OF_EXPERTS,
    "/v1/audio/transcriptions": OF_SPEECH,
    "/v1/realtime": OF_SPEECH,
    "/parse_function_call": OF_GENERATION,
    "/separate_reasoning": OF_GENERATION,
    "/vertex_generate": "Vertex AI's shape hides from the server what is asked for: use /generate",
    "/add_external_corpus": OF_SPECULATION,
    "/remove_external_corpus": OF_SPECULATION,
    "/list_external_corpora": OF_SPECULATION,
    "/slow_down": OF_TESTS,
    "/clear_hicache_storage_backend": OF_A_STORE,
    "/hicache/storage-backend": OF_A_STORE,
    "/hicache/storage-backend/clear": OF_A_STORE,
}


def leave_out(app: FastAPI) -> None:
    """Puts an answer that says why in the place of each of these routes."""
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in LEFT_OUT]
    for path in LEFT_OUT:
        app.api_route(path, methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)(_answer_why)


async def _answer_why(request: Request) -> None:
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    raise HTTPException(
        HTTPStatus.NOT_FOUND,
        f"{path} is not served, since {LEFT_OUT[path]}: start the server with --all-routes where you need it",
    )
