# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Decoding on an OpenAI-compatible server (vLLM, SGLang), many requests at a time."""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from lilicorr_hf.pairs import resolve_target

from .cohorts import DecodingArguments, end_tokens, find_loop, row_noise
from .conversations import Answer, Progress, Request
from .options import option


@dataclass
class ServerArguments(DecodingArguments):
    """How to decode, and which server to ask. Times are in seconds."""

    server: str | None = option(None, "OpenAI-compatible server to use, such as http://localhost:8000/v1.")
    server_model: str | None = option(None, "The target's name on that server, if it is not `target`.")
    server_concurrency: int = option(64, "Requests in flight; keep `cohort_size` several times larger.")
    server_retries: int = option(5, "Further tries of a request that failed for a passing reason.")
    server_backoff: float = option(1.0, "Wait before the first retry; it doubles from one to the next.")
    server_timeout: float = option(600.0, "Longest wait for one response.")


class ServerTarget:
    """The target behind a server. Ids are the server's own where it returns them, else its text through the target's
    tokenizer. Loops are cut after the fact.
    """

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerBase, args: ServerArguments) -> None:
        try:
            config = GenerationConfig.from_pretrained(resolve_target(args.target))
        except OSError:
            config = None
        self.eos_ids = ends = end_tokens(config, tokenizer, args.target)
        self.url, self.tokenizer, self.args = url.rstrip("/"), tokenizer, args
        self.model = args.server_model or args.target
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        rendered: Any = tokenizer.apply_chat_template(chat, return_dict=True)
        # Where the server tells no ids: the end that the template writes behind an answer.
        self.written_end = next((token for token in reversed(rendered["input_ids"]) if token in ends), ends[0])
        self.failed = threading.Event()
        served = [entry["id"] for entry in self._call("/models", None).get("data", [])]
        if served and self.model not in served:
            raise ValueError(f"{self.url} serves {', '.join(served)}, not {self.model}; see --server_model")

    def answer(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Sends the requests, `server_concurrency` at a time. Raises ConnectionError when the retries are used up."""

        def one(request: Request) -> Answer:
            answer = self._answer(request)
            progress(1, len(answer.response_ids))
            return answer

        pool = ThreadPoolExecutor(self.args.server_concurrency)
        try:
            return list(pool.map(one, requests))
        except BaseException:
            self.failed.set()  # the other threads stop retrying
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _answer(self, request: Request) -> Answer:
        args = self.args
        body = {
            "model": self.model,
            "messages": request.messages,
            "max_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "chat_template_kwargs": {"enable_thinking": False},
            "return_token_ids": True,
        }
        if args.temperature > 0:
            noise = row_noise(args.seed, request.row_id, 1).item()
            body |= {"top_p": args.top_p, "seed": int(noise * 2**31)} | ({"top_k": args.top_k} if args.top_k else {})
        choice = self._call("/chat/completions", body)["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(f"{self.url} ended {request.row_id} with finish_reason {choice['finish_reason']!r}")
        ids = choice.get("token_ids")
        if ids is None:
            ids = self.tokenizer(choice["message"]["content"] or "", add_special_tokens=False)["input_ids"]
        kept = find_loop(ids, args.loop_period, args.loop_tokens)
        if kept is not None:
            return Answer(ids[:kept], "rep")
        if choice["finish_reason"] == "length":
            return Answer(ids, "len")
        return Answer(ids if ids and ids[-1] in self.eos_ids else [*ids, self.written_end], "eos")

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON answer to a GET, or to a POST of `body`. Busy servers, server errors and lost connections are
        retried; a refusal (HTTP 4xx) is not.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        for attempt in range(self.args.server_retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.args.server_timeout) as response:
                    return dict(json.load(response))
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 429):
                    raise ValueError(f"{self.url}{path} refused: {error} {error.read(500)!r}") from error
                reason: Exception = error
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = error
            if attempt == self.args.server_retries or self.failed.wait(self.args.server_backoff * 2**attempt):
                break
        raise ConnectionError(f"no answer from {self.url}{path} after {attempt + 1} tries: {reason}") from reason
