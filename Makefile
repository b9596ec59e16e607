# Every target works on a fresh machine: it sets up .venv first where that is needed.
.PHONY: setup setup-dev quickstart test test-all check

setup:
	@scripts/setup

setup-dev:
	@scripts/setup dev

quickstart: setup
	@scripts/quickstart

test: setup-dev
	@scripts/test

test-all: setup-dev
	@scripts/test-all

check: setup-dev
	@scripts/check
