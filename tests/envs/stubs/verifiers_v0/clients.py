# type: ignore
"""Stands in for verifiers.clients."""

from abc import ABC, abstractmethod


class Client(ABC):
    def __init__(self, client_or_config):
        self._client = client_or_config

    @abstractmethod
    def setup_client(self, config): ...
