"""Reading a server's routes, on a real socket."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from routes import routes

from deployments.cli import main
from deployments.endpoint import read_routes
from engine.errors import OutriderError

KEY = "Bearer secret"


class _Server(HTTPServer):
    """Answers as Outrider does, with a key; or, with ``is_other``, as some other server."""

    is_other = False


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        said = routes()
        answers = {
            "/health": json.dumps(said.health),
            "/controller": json.dumps(said.controller),
            "/metrics": said.metrics,
        }
        status, body = 200, answers[self.path]
        if self.server.is_other:
            body = "<html>hello</html>"
        elif self.path != "/health" and self.headers.get("authorization") != KEY:
            status, body = 401, json.dumps({"error": {"message": "a valid API key is needed"}})
        self.send_response(status)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def address(server: _Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_key_is_shown_and_asked_for(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: a server with keys that cannot be watched, or whose refusal looks like a fault of the deployment."""
    monkeypatch.setenv("A_KEY", "secret")
    assert main(["top", "--once", "--url", address(server) + "/v1", "--api-key-env", "A_KEY"]) == 0
    assert "depth 4" in capsys.readouterr().out
    assert main(["doctor", "--url", address(server), "--api-key-env", "A_KEY"]) == 0
    assert "0 problem" in capsys.readouterr().out
    assert main(["top", "--once", "--url", address(server)]) == 1
    assert "give a key by --api-key-env" in capsys.readouterr().err


def test_another_server_is_recognised(server: _Server) -> None:
    """Bug guarded: a traceback from HTML."""
    server.is_other = True
    with pytest.raises(OutriderError, match="no Outrider server answers there"):
        read_routes(address(server), {})
