"""A Hub of one's own: what `huggingface_hub` asks for when a model is created, pushed and loaded, over real HTTP."""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from servers import running


TOKEN, USER = "hf_test_token_of_nobody", "nobody"


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    commits: list[Commit] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        """Newest content of every path."""
        return self.at(len(self.commits))

    def at(self, count: int) -> dict[str, bytes]:
        """Content of every path after the first `count` commits."""
        return {path: content for commit in self.commits[:count] for path, content in commit.files.items()}

    def count(self, revision: str) -> int | None:
        """How many commits a revision stands for: `main`, or a commit's id, which is its number."""
        known = {"main": len(self.commits)} | {sha(number): number for number in range(len(self.commits) + 1)}
        return known.get(revision)


def sha(number: int) -> str:
    return f"{number:040x}"


class FakeHub(ThreadingHTTPServer):
    """
    Repositories of models in memory. `failures` maps a piece of a path to the status that requests there get, with
    how many of them: `{"/commit/": (403, 1)}`; `readable` are repositories that nobody here may write to, `gated` ones
    that nobody here may read.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.failures: dict[str, tuple[int, int]] = {}
        self.readable: set[str] = set()
        self.gated: set[str] = set()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.handle_request("GET")

    def do_HEAD(self) -> None:
        self.handle_request("HEAD")

    def do_POST(self) -> None:
        self.handle_request("POST")

    def do_PUT(self) -> None:
        self.handle_request("PUT")

    def handle_request(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{method} {path}")
        for piece, (status, left) in self.server.failures.items():
            if piece in path and left:
                self.server.failures[piece] = (status, left - 1)
                return self.reply(status, {"error": f"refused with {status}"})
        # Storage has signed links instead of tokens.
        if not path.startswith("/storage/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(401, {"error": "Invalid username or password."})
        for route, answer in ROUTES:
            if match := re.fullmatch(route, f"{method} {path}"):
                return answer(self, body, **match.groupdict())
        self.reply(404, {"error": f"no such place: {method} {path}"})

    def reply(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = {"url": f"{self.server.url}/{name}", "name": name, "id": "0"}
        if name in self.server.readable:
            return self.reply(403, {"error": "You don't have the rights to create a model under this namespace"})
        if name in self.server.repositories:
            return self.reply(409, answer | {"error": "You already created this model repo"})
        self.server.repositories[name] = Repository()
        self.reply(200, answer)

    def find(self, name: str, revision: str) -> tuple[dict[str, bytes], str] | None:
        """Files and commit id of a revision; replies with what is wrong if there are none."""
        repository = self.server.repositories.get(name)
        if repository is None:
            self.reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif name in self.server.gated:
            self.reply(403, {"error": f"Access to model {name} is restricted"}, X_Error_Code="GatedRepo")
        elif (count := repository.count(revision)) is None:
            self.reply(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
        else:
            return repository.at(count), sha(count)
        return None

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        if (found := self.find(name, revision)) is not None:
            files, commit = found
            self.reply(200, {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]})

    def tree(self, body: bytes, name: str, revision: str, folder: str | None = None) -> None:
        if (found := self.find(name, revision)) is not None:
            described = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in found[0].items()
                if path.startswith(folder or "")
            ]
            self.reply(200, described)

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        if (found := self.find(name, revision)) is None:
            return
        files, commit = found
        if path not in files:
            return self.reply(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        etag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
        self.reply(200, files[path], X_Repo_Commit=commit, ETag=etag)

    def may_write(self, body: bytes, name: str) -> None:
        status = 403 if name in self.server.readable else 200 if name in self.server.repositories else 404
        self.reply(status, {} if status == 200 else {"error": "no right to write"})

    def validate(self, body: bytes) -> None:
        front = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        metadata = yaml.safe_load(front.group(1)) if front else None
        wrong = [] if isinstance(metadata, dict) else [{"message": "no metadata"}]
        self.reply(400 if wrong else 200, {"errors": wrong, "warnings": []})

    def preupload(self, body: bytes, name: str) -> None:
        files = [
            {"path": file["path"], "uploadMode": mode_of(file["path"]), "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        self.reply(200, {"files": files})

    def lfs_batch(self, body: bytes, name: str) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.server.blobs:
                answer["actions"] = {"upload": {"href": f"{self.server.url}/storage/{wanted['oid']}"}}
            objects.append(answer)
        self.reply(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.reply(400, {"error": "the content is not what was announced"})
        self.server.blobs[oid] = body
        self.reply(200, {})

    def commit(self, body: bytes, name: str) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        commit = Commit(lines[0]["value"]["summary"], {})
        for line in lines[1:]:
            value = line["value"]
            content = {"file": inline, "lfsFile": self.stored}[line["key"]]
            commit.files[value["path"]] = content(value)
        self.server.repositories[name].commits.append(commit)
        oid = sha(len(self.server.repositories[name].commits))
        self.reply(200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    def stored(self, value: dict[str, Any]) -> bytes:
        return self.server.blobs[value["oid"]]

    def log_message(self, *args) -> None:
        pass


def inline(value: dict[str, Any]) -> bytes:
    assert value["encoding"] == "base64"
    return base64.b64decode(value["content"])


def mode_of(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".bin", ".pt", ".pth")) else "regular"


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[\w.-]+)"
ROUTES = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate),
    (rf"GET /api/models/{NAME}/auth-check/write", Handler.may_write),
    (rf"GET /api/models/{NAME}", Handler.info),
    (rf"GET /api/models/{NAME}/revision/{REVISION}", Handler.info),
    (rf"GET /api/models/{NAME}/tree/{REVISION}(?:/(?P<folder>.*))?", Handler.tree),
    (rf"(?:GET|HEAD) /{NAME}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
    (rf"POST /api/models/{NAME}/preupload/main", Handler.preupload),
    (rf"POST /api/models/{NAME}/commit/main", Handler.commit),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"PUT /storage/(?P<oid>\w+)", Handler.store),
]


def environment(folder: Path, endpoint: str, token: str | None = TOKEN) -> dict[str, str]:
    """Of a process that knows that Hub and that token alone."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE"))}
    if token is not None:
        kept["HF_TOKEN"] = token
    # Xet storage speaks a protocol of its own; without it large files go by Git LFS.
    own = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    return kept | own | {"no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"}


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()
    with running(hub):
        yield hub
