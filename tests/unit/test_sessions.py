"""Sticky sessions, also beside the session manager of model-hosting-container-standards."""

from __future__ import annotations

import re
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lorahost.errors import InvalidRequestError, OverloadedError
from lorahost.requests.headers import CLOSED_SESSION_ID, NEW_SESSION_ID, SESSION_ID
from lorahost.requests.sessions import SessionStore

START = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def test_create_answers_both_headers_with_the_expiry() -> None:
    answer = SessionStore(True, 60, clock=Clock()).handle("NEW_SESSION", "NEW_SESSION")
    assert set(answer.headers) == {NEW_SESSION_ID, SESSION_ID}
    assert answer.headers[NEW_SESSION_ID] == answer.headers[SESSION_ID]
    session_id, expires = answer.headers[NEW_SESSION_ID].split("; Expires=")
    assert re.fullmatch(r"[\w.-]{1,256}", session_id)
    when = datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert when.timestamp() == START + 60


def test_a_session_lives_until_closed() -> None:
    store = SessionStore(True)
    session = store.create()
    assert store.check(session.id) == session
    assert store.handle("CLOSE", session.id).headers == {CLOSED_SESSION_ID: session.id}
    for again in (store.check, store.close):
        with pytest.raises(InvalidRequestError) as caught:
            again(session.id)
        assert (caught.value.status, caught.value.code) == (400, "unknown_session")


def test_expiry_counts_from_creation_and_use_does_not_extend_it() -> None:
    clock = Clock()
    store = SessionStore(True, 60, max_sessions=1, clock=clock)
    session = store.create()
    clock.now += 60
    assert store.check(session.id) == session
    clock.now += 0.5
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="expired; sessions live 60 s"):
            store.check(session.id)
    assert store.create().id != session.id


def test_a_request_without_a_session_passes_whether_on_or_off() -> None:
    assert SessionStore(True).check(None) is None
    assert SessionStore(False).check(None) is None


def test_switched_off() -> None:
    store = SessionStore(False)
    for attempt in (store.create, lambda: store.check("x"), lambda: store.handle("CLOSE", "x")):
        with pytest.raises(InvalidRequestError, match="SAGEMAKER_ENABLE_STATEFUL_SESSIONS") as caught:
            attempt()
        assert (caught.value.status, caught.value.code) == (400, "sessions_disabled")


def test_close_needs_the_header() -> None:
    with pytest.raises(InvalidRequestError, match=SESSION_ID) as caught:
        SessionStore(True).handle("CLOSE", None)
    assert caught.value.code == "missing_session"


def test_the_number_is_bounded_until_one_expires() -> None:
    clock = Clock()
    store = SessionStore(True, 60, max_sessions=2, clock=clock)
    store.create()
    clock.now += 10
    store.create()
    with pytest.raises(OverloadedError, match="2 sessions are open; the limit is 2") as caught:
        store.create()
    assert (caught.value.status, caught.value.retry_after_s) == (424, 50)
    clock.now += 50.5
    assert store.create().expires_at == clock.now + 60
    with pytest.raises(OverloadedError, match="2 sessions are open"):
        store.create()


@pytest.mark.parametrize("arguments", [{"expiration_s": 0}, {"max_sessions": 0}])
def test_bad_settings(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        SessionStore(True, **arguments)


def test_threads_never_pass_the_bound() -> None:
    store = SessionStore(True, max_sessions=50)
    refused: list[OverloadedError] = []
    opened: list[str] = []

    def work() -> None:
        for _ in range(20):
            try:
                opened.append(store.create().id)
            except OverloadedError as error:
                refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(opened)) == len(opened) == 50
    assert len(refused) == 8 * 20 - 50


def test_beside_model_hosting_container_standards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager_module = pytest.importorskip("model_hosting_container_standards.sagemaker.sessions.manager")
    models = pytest.importorskip("model_hosting_container_standards.sagemaker.sessions.models")
    header = models.SageMakerSessionHeader
    assert (header.SESSION_ID, header.NEW_SESSION_ID, header.CLOSED_SESSION_ID) == (
        SESSION_ID,
        NEW_SESSION_ID,
        CLOSED_SESSION_ID,
    )
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    theirs = manager_module.SessionManager({"sessions_expiration": "60", "sessions_path": str(tmp_path)})
    ours = SessionStore(True, 60, clock=clock)
    their_session, our_session = theirs.create_session(), ours.create()
    assert their_session.expiration_ts == our_session.expires_at
    assert len(their_session.session_id) == len(our_session.id)

    clock.now += 60
    assert theirs.get_session(their_session.session_id) is not None
    assert ours.check(our_session.id) is not None
    for refuse in (theirs.get_session, theirs.close_session):
        with pytest.raises(ValueError, match="not found"):
            refuse("nobody")
    with pytest.raises(InvalidRequestError):
        ours.check("nobody")

    clock.now += 1
    # The difference: theirs lets the first request of an expired session through, ours refuses it.
    assert theirs.get_session(their_session.session_id) is None
    with pytest.raises(InvalidRequestError):
        ours.check(our_session.id)
    with pytest.raises(ValueError, match="not found"):
        theirs.get_session(their_session.session_id)
