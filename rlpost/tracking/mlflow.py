"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from rlpost.tracking.base import Status, TrackedRun, described_flat

ENDINGS = {Status.finished: "FINISHED", Status.stopped: "KILLED", Status.failed: "FAILED"}
PARAMS_AT_ONCE = 100  # MLflow's limits
LONGEST_PARAM = 6000  # characters
REFUSED = re.compile(r"[^\w\-. :/]")  # in the name of a metric


@dataclass
class MLflowTracker:
    """An MLflow run on the server `uri`, None: in sqlite in the run's folder.

    Parameters are those of the first attempt, since MLflow lets none change; a character that it
    refuses in a metric's name becomes `_`. A resumed run goes on under the same id. MLflow takes no
    figure back: the steps that a crash undid are there twice, and the later is the one that counts.
    """

    uri: str | None
    experiment: str

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        own = run.folder / "mlflow"
        if self.uri is None:
            own.mkdir(parents=True, exist_ok=True)
        uri = self.uri and _with_password_in_environment(self.uri)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{(own / 'mlflow.db').resolve()}")
        if run.known_as is not None:
            self._client.update_run(run.known_as, status="RUNNING")
            self._id = run.known_as
            return self._id
        tags = {"rlpost.folder": str(run.folder)}
        self._id = self._client.create_run(self._experiment_id(own), run_name=run.name, tags=tags).info.run_id
        params = [Param(key, text[:LONGEST_PARAM]) for key, text in described_flat(run).items()]
        for begin in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[begin : begin + PARAMS_AT_ONCE])
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        figures = [Metric(REFUSED.sub("_", name), number, now, step) for name, number in metrics.items()]
        self._client.log_batch(self._id, metrics=figures)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, ENDINGS[status])

    def _experiment_id(self, own: Path) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return found.experiment_id
        # a server knows where its artifacts go; a database of one's own would put them into ./mlruns
        artifacts = None if self.uri else str((own / "artifacts").resolve())
        return self._client.create_experiment(self.experiment, artifact_location=artifacts)


def _with_password_in_environment(uri: str) -> str:
    """A server's address without the user and password in it, which MLflow also takes from the environment.

    Its errors name the address, and stand in log.txt.
    """
    parts = urlsplit(uri)
    if not parts.scheme.startswith("http") or parts.password is None:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
