# Every target works on a fresh machine: it sets up .venv first where that is needed.
.PHONY: setup quickstart test check

PYTHON ?= python3

setup:
	@PYTHON="$(PYTHON)" scripts/setup

quickstart: setup
	@scripts/quickstart

test: setup
	@scripts/test

check: setup
	@scripts/check
