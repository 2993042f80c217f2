"""The local account as one HTTP server."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lorahost_deploy.local.app import SERVICES, App
from lorahost_deploy.local.containers import Launcher
from lorahost_deploy.local.state import Conduct, World


class LocalAws:
    """Listens on a port of this machine.

    Args:
        launcher: Starts the containers.
        work_dir: For downloaded models.
        port: 0 takes a free one.
        conduct: How it behaves; may be changed while it runs.
    """

    def __init__(
        self, launcher: Launcher, work_dir: Path, *, port: int = 0, region: str, conduct: Conduct | None = None
    ) -> None:
        import boto3
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        work_dir.mkdir(parents=True, exist_ok=True)
        self._session: Any = boto3.Session(region_name=region, aws_access_key_id="local", aws_secret_access_key="local")
        self._clients: dict[str, Any] = {}
        self._clients_lock = threading.Lock()
        self.conduct = conduct or Conduct()
        self.world = World(launcher, work_dir, region, self.conduct, self._client)
        models = {name: self._model(name) for name in SERVICES.values()}
        app = App(self.world, models, DomainDispatcherApplication(create_backend_app))
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", port, app, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _model(self, service: str) -> Any:
        return self._session.client(service, endpoint_url="http://unused").meta.service_model

    def _client(self, service: str) -> Any:
        """A client of this very server, for what moto plays."""
        with self._clients_lock:
            if service not in self._clients:
                self._clients[service] = self._session.client(service, endpoint_url=self.url)
            return self._clients[service]

    def serve(self) -> None:
        """Answers until `stop`."""
        self._server.serve_forever()

    def stop(self) -> None:
        """Stops answering, and all containers."""
        self._server.shutdown()
        self._server.server_close()
        self.world.launcher.close()


@contextlib.contextmanager
def running(local: LocalAws) -> Iterator[LocalAws]:
    """Serves for the length of a `with`."""
    threading.Thread(target=local.serve, daemon=True).start()
    try:
        yield local
    finally:
        local.stop()
