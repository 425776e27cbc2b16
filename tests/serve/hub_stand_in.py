"""A stand-in for the Hugging Face hub: the routes that its client calls, with the shapes and refusals of the real one.

Recorded from the hub's public API (huggingface.co/docs/hub/api) and from what huggingface_hub 2.4 sends and expects:
`repos/create`, `validate-yaml`, `preupload`, LFS `batch`, `PUT`, `verify`, `commit` (NDJSON), `revision`, `tree`,
`resolve`.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import yaml

TOKEN = "hf_" + "testtoken" * 4
READ_ONLY = "hf_" + "readtoken" * 4
OWNER = "me"
LARGEST_REGULAR = 10 * 2**20
Files = dict[str, tuple[bytes, bool]]


def git_sha(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class Hub:
    """Its state: repositories -> commit -> path -> (content, whether it is in LFS), and uploaded objects."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.heads: dict[str, str] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.largest_object = 2**30
        self.damage: dict[str, bytes] = {}  # path -> what is served in place of its content
        self.calls: list[str] = []
        self.url = ""

    def add(self, name: str, files: dict[str, bytes]) -> str:
        self.repos.setdefault(name, {})
        commit = hashlib.sha1(f"{name}{len(self.repos[name])}".encode()).hexdigest()
        old = self.repos[name].get(self.heads.get(name, ""), {})
        self.repos[name][commit] = {
            **old,
            **{path: (c, path.endswith(".safetensors")) for path, c in files.items()},
        }
        self.heads[name] = commit
        self.private.setdefault(name, False)
        return commit


@contextmanager
def serve():
    """Yield a running hub."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def reply(self, status: int, content, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply(status, {"error": message}, headers)

    def user(self) -> str | None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return {TOKEN: OWNER, READ_ONLY: "reader"}.get(given)

    def route(self) -> None:
        path = unquote(urlparse(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.calls.append(f"{self.command} {path}")
        for pattern, method, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and (self.command == method or (self.command, method) == ("HEAD", "GET")):
                action(self, body, *match.groups())
                return
        self.refuse(404, f"Cannot {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = route

    # Writing

    def may_write(self, name: str) -> bool:
        if self.user() is None:
            self.refuse(401, "Invalid username or password.")
        elif name not in self.hub.repos:
            self.refuse(404, "Repository not found", "RepoNotFound")
        elif self.user() != name.split("/")[0]:
            self.refuse(403, "Forbidden: you must use a write token")
        else:
            return True
        return False

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or self.user()}/{asked['name']}"
        if self.user() is None:
            return self.refuse(401, "Invalid username or password.")
        if self.user() != name.split("/")[0]:
            return self.refuse(
                403, f"You don't have the rights to create a model under the namespace {name.split('/')[0]}"
            )
        if name in self.hub.repos:
            return self.reply(
                409,
                {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"},
                {"X-Error-Message": "You already created this model repo"},
            )
        self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        self.hub.private[name] = asked.get("private") is True or asked.get("visibility") == "private"
        return self.reply(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": "0" * 24})

    def validate(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        problem = card_fault(content)
        if problem:
            return self.reply(400, {"errors": [{"message": problem}], "warnings": []})
        return self.reply(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        if not self.may_write(name):
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs"
                if file["path"].endswith(".safetensors") or file["size"] > LARGEST_REGULAR
                else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self.reply(200, {"files": files, "commitOid": self.hub.heads[name]})

    def batch(self, body: bytes, name: str) -> None:
        if not self.may_write(name):
            return
        objects = []
        for item in json.loads(body)["objects"]:
            if item["size"] > self.hub.largest_object:
                error = {"code": 413, "message": "File too large"}
                objects.append({"oid": item["oid"], "size": item["size"], "error": error})
                continue
            actions = {
                "upload": {"href": f"{self.hub.url}/lfs/{item['oid']}/{item['size']}", "header": {}},
                "verify": {"href": f"{self.hub.url}/{name}.git/info/lfs/objects/verify", "header": {}},
            }
            objects.append(
                {"oid": item["oid"], "size": item["size"], "authenticated": True, "actions": actions}
            )
        self.reply(200, {"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, oid: str, size: str) -> None:
        if len(body) != int(size):
            return self.refuse(400, "the length is not what was announced")
        if hashlib.sha256(body).hexdigest() != oid:
            return self.refuse(400, "the content has another sha256")
        self.hub.objects[oid] = body
        return self.reply(200, b"")

    def verify(self, body: bytes, name: str) -> None:
        asked = json.loads(body)
        if len(self.hub.objects.get(asked["oid"], b"")) != asked["size"]:
            return self.refuse(404, "Object does not exist on the server")
        return self.reply(200, {})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        if not self.may_write(name):
            return None
        lines = [json.loads(line) for line in body.decode().splitlines()]
        if lines[0]["key"] != "header" or not lines[0]["value"]["summary"]:
            return self.refuse(400, "the first line must be the header, with a summary")
        files = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                content = self.hub.objects.get(value["oid"])
                if content is None or len(content) != value["size"]:
                    return self.refuse(
                        400, f"LFS pointer pointed to a file that does not exist: {value['path']}"
                    )
                files[value["path"]] = content
            else:
                files[value["path"]] = base64.b64decode(value["content"])
                if len(files[value["path"]]) > LARGEST_REGULAR:
                    return self.refuse(413, "the file must be uploaded with LFS")
                if value["path"] == "README.md" and (problem := card_fault(files["README.md"].decode())):
                    return self.refuse(400, problem)
        oid = self.hub.add(name, files)
        url = f"{self.hub.url}/{name}/commit/{oid}"
        return self.reply(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    # Reading

    def files(self, name: str, revision: str) -> tuple[str, Files] | None:
        """Find the files of a revision, or refuse: without a token a private or an unknown model is a 401."""
        if name not in self.hub.repos or (self.hub.private[name] and self.user() != name.split("/")[0]):
            self.refuse(404 if self.user() else 401, "Repository not found", "RepoNotFound")
            return None
        commit = self.hub.heads[name] if revision == "main" else revision
        if commit not in self.hub.repos[name]:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return None
        return commit, self.hub.repos[name][commit]

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        found = self.files(name, revision)
        if found is None:
            return
        siblings = []
        for path, (content, is_lfs) in found[1].items():
            row = {"rfilename": path, "size": len(content), "blobId": git_sha(content)}
            if is_lfs:
                row["lfs"] = {
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "size": len(content),
                    "pointerSize": 134,
                }
            siblings.append(row)
        private = self.hub.private[name]
        self.reply(
            200,
            {
                "_id": "0" * 24,
                "id": name,
                "modelId": name,
                "sha": found[0],
                "private": private,
                "tags": [],
                "siblings": siblings,
            },
        )

    def tree(self, body: bytes, name: str, revision: str) -> None:
        found = self.files(name, revision)
        if found is None:
            return
        rows = []
        for path, (content, is_lfs) in found[1].items():
            row = {"type": "file", "path": path, "size": len(content), "oid": git_sha(content)}
            if is_lfs:
                row["lfs"] = {
                    "oid": hashlib.sha256(content).hexdigest(),
                    "size": len(content),
                    "pointerSize": 134,
                }
            rows.append(row)
        self.reply(200, rows)

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        found = self.files(name, revision)
        if found is None:
            return None
        if path not in found[1]:
            return self.refuse(404, "Entry not found", "EntryNotFound")
        content, is_lfs = found[1][path]
        etag = hashlib.sha256(content).hexdigest() if is_lfs else git_sha(content)
        headers = {"X-Repo-Commit": found[0], "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if is_lfs:
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{etag}"'}
        return self.reply(200, self.hub.damage.get(path, content), headers)


def card_fault(text: str) -> str:
    """Return what the hub's metadata check says of a card: front matter must be YAML, model-index complete."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return ""
    try:
        head = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return f"invalid YAML: {error}"
    if "license" in head and not re.fullmatch(r"[a-z0-9.-]+", str(head["license"])):
        return '"license" must be one of the known licences'
    for entry in head.get("model-index", []):
        if not entry.get("name") or not entry.get("results"):
            return '"model-index[0].results" is required'
        for result in entry["results"]:
            if not result.get("task", {}).get("type") or not {"type", "name"} <= set(
                result.get("dataset", {})
            ):
                return '"model-index[0].results[0]" needs task.type, dataset.type and dataset.name'
            if not all({"type", "value"} <= set(metric) for metric in result.get("metrics", [{}])):
                return '"model-index[0].results[0].metrics[0]" needs type and value'
    return ""


NAME, REV = r"([\w.-]+/[\w.-]+)", r"([\w.-]+)"
ROUTES = [
    (r"/api/repos/create", "POST", Handler.create),
    (r"/api/validate-yaml", "POST", Handler.validate),
    (rf"/api/models/{NAME}/preupload/{REV}", "POST", Handler.preupload),
    (rf"/{NAME}\.git/info/lfs/objects/batch", "POST", Handler.batch),
    (rf"/{NAME}\.git/info/lfs/objects/verify", "POST", Handler.verify),
    (r"/lfs/([0-9a-f]{64})/([0-9]+)", "PUT", Handler.upload),
    (rf"/api/models/{NAME}/commit/{REV}", "POST", Handler.commit),
    (rf"/api/models/{NAME}", "GET", Handler.info),
    (rf"/api/models/{NAME}/revision/{REV}", "GET", Handler.info),
    (rf"/api/models/{NAME}/tree/{REV}/?", "GET", Handler.tree),
    (rf"/{NAME}/resolve/{REV}/(.+)", "GET", Handler.resolve),
]
