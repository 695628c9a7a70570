"""A stub server's answers become rows, and its failures leave none."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from regeneration import WORDS, arguments, read_rows, write_rows
from servers import running

from lilicorr_hf.training.conversations import render
from lilicorr_hf.training.regenerate import RegenerateArguments, regenerate


class Stub(BaseHTTPRequestHandler):
    """Answers the last user message backwards; fails the first `server.failures` posts with 503."""

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.failures:
            self.server.failures -= 1
            self.reply(503, {"error": "busy"})
        elif "w13" in json.dumps(body["messages"]):
            self.reply(400, {"error": "unlucky"})
        else:
            words = body["messages"][-1]["content"].split()[::-1]
            choice = {"message": {"content": " ".join(words)}, "finish_reason": "stop"}
            if "w2" in words:
                choice["finish_reason"] = "length"
            if "w3" in words:
                choice["token_ids"] = [33, 2]
            self.reply(200, {"choices": [choice]})

    def reply(self, code: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    made.failures, made.bodies = 0, []
    with running(made):
        yield made


def served(server: ThreadingHTTPServer, tmp_path: Path, contents: list[str], **changes) -> RegenerateArguments:
    rows = [{"id": text, "prompt": text} for text in contents]
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    return arguments(write_rows(tmp_path / "in.jsonl", rows), server=url, **changes)


def test_server(server, tokenizer, tmp_path):
    server.failures = 3
    args = served(server, tmp_path, ["w4 w5", "w2", "w3", "w6 " * 30])
    report = regenerate(args, tokenizer=tokenizer)
    rows = {row["id"]: row for row in read_rows(args.output)}
    word = {w: i for i, w in enumerate(WORDS)}
    assert (rows["w4 w5"]["response_ids"], rows["w4 w5"]["stop"]) == ([word["w5"], word["w4"], 2], "eos")
    assert (rows["w2"]["response_ids"], rows["w2"]["stop"]) == ([word["w2"]], "len")
    assert (rows["w3"]["response_ids"], rows["w3"]["stop"]) == ([33, 2], "eos")
    assert (rows["w6 " * 30]["response_ids"], rows["w6 " * 30]["stop"]) == ([word["w6"]], "rep")
    assert rows["w2"]["prompt_ids"] == render(tokenizer, [{"role": "user", "content": "w2"}])
    assert report.answers == 4 and len(server.bodies) == 7
    body = server.bodies[0]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 40, 0.0)
    assert regenerate(args, tokenizer=tokenizer).already_done == 4 and len(server.bodies) == 7


def test_server_failures_are_named_and_leave_no_torn_rows(server, tokenizer, tmp_path):
    args = served(server, tmp_path, ["w4", "w13"], cohort_size=2, server_retries=1)
    with pytest.raises(ValueError, match=r"refused: HTTP Error 400.*unlucky"):
        regenerate(args, tokenizer=tokenizer)
    server.failures = 100
    with pytest.raises(ConnectionError, match=r"no answer from .* after \d tries: HTTP Error 503"):
        regenerate(args, tokenizer=tokenizer)
    assert Path(args.output).read_bytes() == b""
    with pytest.raises(ValueError, match="serves tiny, not big"):
        regenerate(served(server, tmp_path, ["w4"], output="b.jsonl", target="big"), tokenizer=tokenizer)


def test_an_unreachable_server_is_named(tokenizer, prompts):
    args = arguments(prompts, server="http://127.0.0.1:9/v1", server_retries=1)
    with pytest.raises(ConnectionError, match=r"no answer from http://127\.0\.0\.1:9/v1/models after 2 tries"):
        regenerate(args, tokenizer=tokenizer)
