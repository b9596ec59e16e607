# type: ignore
"""Stands in for verifiers.types."""


class Data:
    def __init__(self, **fields):
        self.__dict__.update(fields)


Usage = AssistantMessage = ResponseMessage = Response = Data
