"""Who gets a page of a job, and who does not."""

import http.client
from contextlib import contextmanager

import pytest

from phalanx.errors import LaunchError
from phalanx.inspect.http_server import HTTPServer, Page


def fail():
    raise LaunchError("the job has ended")


PAGES = {"/": lambda: Page("text/plain", b"the job"), "/broken": fail}


@contextmanager
def served(token=""):
    server = HTTPServer("127.0.0.1", 0, PAGES, token=token)
    try:
        yield server
    finally:
        server.close()


def get(server, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_a_page_is_made_when_it_is_asked_for():
    with served() as server:
        assert get(server) == (200, "the job")
        assert get(server, "/other")[0] == 404
        assert get(server, "/broken") == (503, "the job has ended\n")


def test_without_a_token_only_a_name_of_this_machine_reaches_it():
    """A page of another site reaches 127.0.0.1 by a name of its own, if that is all that is asked (DNS rebinding)."""
    with served() as server:
        assert get(server, Host=f"localhost:{server.port}")[0] == 200
        assert get(server, Host="evil.example")[0] == 403


def test_with_a_token_only_who_brings_it_gets_the_page():
    with served(token="secret") as server:
        assert get(server)[0] == 403
        assert get(server, "/?token=wrong")[0] == 403
        assert get(server, Authorization="Bearer wrong")[0] == 403
        assert get(server, "/?token=secret") == (200, "the job")
        assert get(server, Authorization="Bearer secret", Host="gpu-7.example:9400") == (200, "the job")


def test_an_address_that_others_reach_needs_a_token():
    with pytest.raises(ValueError, match=r"others can reach 0\.0\.0\.0, and nothing is served to whoever comes by"):
        HTTPServer("0.0.0.0", 0, PAGES)
    server = HTTPServer("0.0.0.0", 0, PAGES, token="secret")
    try:
        assert get(server)[0] == 403
        assert get(server, "/?token=secret")[0] == 200
    finally:
        server.close()
