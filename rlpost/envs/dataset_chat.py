"""DatasetChatEnv: a conversation about each row of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from rlpost.data.complaints import Complaint, Malformed
from rlpost.data.conversation import Completion, Message
from rlpost.data.datasets import HELD_OUT, DemonstratedRows, LocatedRows, located_rows
from rlpost.data.row_store import Row
from rlpost.data.sources import Dataset, is_path
from rlpost.envs.chat import ChatEnv
from rlpost.envs.ordered_rows import OrderedRows
from rlpost.envs.rows import order_seed
from rlpost.envs.transforms.dataloading import DataLoadingPrimer, Draw
from rlpost.errors import ConfigError, DataError
from rlpost.settings import EnvSettings

if TYPE_CHECKING:
    from rlpost.data.demonstrations import Demonstration

CHOOSING = ("long_prompts", "pass_rates", "min_pass_rate", "max_pass_rate")  # settings read once a model is known


class DatasetChatEnv(ChatEnv):
    """A `ChatEnv` whose prompts are the rows of a dataset, one turn each unless `max_steps` says more.

    `dataset` is a sequence of mappings, or a path or hub id as `located_rows` takes. It keeps
    `num_envs` conversations under way and gives each row to `repeats` of them in a row; with
    `group_repeats` there are `num_envs * repeats`, so that a draw holds `num_envs` whole groups.
    The order of the rows is a function of `seed` and the position alone. `batch_size_dl` rows are
    fetched from the dataset at a time. `held_out` is the share of the prompts that `located_rows` keeps
    for the split test of a path without one. Other arguments are `ChatEnv`'s.
    """

    source_settings: EnvSettings | None = None  # of a source of a mix
    config: str | None = None  # of a dataset on the hub
    test_path: str | None = None  # where the split test is, if not in `dataset`

    def __init__(
        self,
        dataset: Dataset,
        *,
        split: str = "train",
        limit: int | None = None,
        held_out: float = HELD_OUT,
        shuffle: bool = True,
        num_envs: int = 1,
        repeats: int = 1,
        batch_size_dl: int = 1,
        seed: int = 0,
        group_repeats: bool = False,
        data_key: str = "question",
        max_steps: int | None = 1,
        **chat: Any,
    ) -> None:
        if min(num_envs, repeats, batch_size_dl) < 1:
            raise ConfigError(
                f"num_envs={num_envs}, repeats={repeats} and batch_size_dl={batch_size_dl} must be at least 1"
            )
        size = num_envs * repeats if group_repeats else num_envs
        super().__init__(size, data_key=data_key, max_steps=max_steps, **chat)
        self.dataset = dataset
        self.split = split
        self.limit = limit
        self.held_out = held_out
        self.shuffle = shuffle
        self.repeats = repeats
        self.seed = seed
        self.read_ahead = batch_size_dl
        self._rows: Any = None

    @classmethod
    def of(cls, settings: EnvSettings, *, seed: int, **common: Any) -> Self:
        """The environment that `settings` describe; `seed` is the run's, `common` what every environment takes.

        One that is None in `common` is left to the constructor, whose defaults are the environment's own.
        """
        given = {name: value for name, value in common.items() if value is not None}
        own = cls.arguments_of(settings)
        return cls(seed=order_seed(seed, own.pop("seed", 0)), **own, **given)

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """What `settings` add to `EnvSettings`, as the constructor takes it: by name, `path` as `dataset`."""
        common = {*(field.name for field in fields(EnvSettings)), *CHOOSING}  # of the rows that are read
        own = {f.name: _plain(getattr(settings, f.name)) for f in fields(settings) if f.name not in common}
        return {"dataset" if name == "path" else name: value for name, value in own.items()}

    def start(self) -> None:
        """Read the rows, and write the first prompt to see that the template fits.

        Raises DataError for a dataset or row that cannot be used, ConfigError for the template.
        """
        super().start()
        if self._rows is None:
            self._rows = self.open_rows(self.seed)
            self.opening_messages(next(self._rows.iter_from(0)))
            self.primer = DataLoadingPrimer(self._rows, repeats=self.repeats)

    def open_rows(self, seed: int) -> Any:
        """The rows in the order of `seed`: something with `iter_from`, `count` and `fingerprint`."""
        rows = self.load(self.split) if self._rows is None else self._rows.rows
        if not len(rows):
            raise DataError("the dataset is empty: give at least one row")
        return OrderedRows(rows, shuffle=self.shuffle, seed=seed, read_ahead=self.read_ahead)

    def load(self, split: str) -> Sequence[Mapping[str, Any]]:
        """The tasks of one split, `limit` at most."""
        if is_path(self.dataset):
            return self.located(split)
        rows: Any = self.dataset
        return rows if self.limit is None else [rows[i] for i in range(min(self.limit, len(rows)))]

    def located(
        self,
        split: str,
        check: Callable[[Row], Complaint | None] | None = None,
        prompt: Callable[[Row], str] | None = None,
        prepare: Callable[[Row], Row] = dict,
        malformed: Malformed | None = None,
    ) -> LocatedRows:
        """The rows of one split with their places, as `located_rows` reads, checks and divides them.

        Without `prompt` a row's `data_key` is its prompt, and has to be text.
        """
        return located_rows(
            self.dataset,
            split,
            (self.data_key,) if prompt is None else (),
            self.limit,
            config=self.config,
            check=check,
            prepare=prepare,
            held_out=self.held_out,
            test_path=self.test_path,
            prompt=prompt,
            malformed=malformed,
            shared_as=f"{type(self).__module__}.{type(self).__qualname__}({self.reads}) {malformed is None}",
        )

    @property
    def reads(self) -> str:
        """All that decides how a row is read, in words."""
        return self.data_key

    def drop_rows(self, numbers: Sequence[int], why: str) -> None:
        """Draw no more of these rows of the split, numbered from 0. Raises DataError, saying `why`, if none is left."""
        rows, gone = self._rows.rows, set(numbers)
        kept = [number for number in range(len(rows)) if number not in gone]
        if not kept:
            raise DataError(f"{why}: none is left")
        self._rows.rows = rows.only(kept) if isinstance(rows, LocatedRows) else [rows[number] for number in kept]
        self._rows = self.open_rows(self.seed)
        self.primer = DataLoadingPrimer(self._rows, repeats=self.repeats)

    def _place(self, drawn: Draw) -> str:
        own = self.primer is not None and self.primer.serves(self._rows)  # not one that was appended
        return self.place_of(drawn.group - self.primer.first_group) if own and self.primer else ""

    def place_of(self, position: int) -> str:
        """The place of the row at `position` of the order; empty where tasks are made rather than kept as rows."""
        return self.where(self._rows.row_at(position)) if isinstance(self._rows, OrderedRows) else ""

    @property
    def parts(self) -> list[DatasetChatEnv]:
        """The environments of which each answers and scores conversations of its own: this one, unless it is a mix."""
        return [self]

    @property
    def order(self) -> Any:
        """The prompts in their order, once this environment is started: see `open_rows`."""
        return self._rows

    def where(self, number: int) -> str:
        """The place of a row of this split, from 0: file and row, where it comes from one."""
        rows = self._rows.rows
        return rows.where(number) if isinstance(rows, LocatedRows) else f"{self.split} row {number + 1}"

    @property
    def num_tasks(self) -> int:
        """How many different prompts this split has; reads the rows."""
        self.start()
        return self._rows.count()

    def prompts_shared_with(self, other: DatasetChatEnv) -> int:
        """How many prompts of this split are also prompts of `other`; reads the rows of both."""
        return len(self._openings() & other._openings())

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The tasks of this split; none where they are made rather than kept."""
        self.start()
        return getattr(self._rows, "rows", ())

    def _openings(self) -> set[int]:
        """A hash of how the conversation about each row begins; none where tasks are made rather than kept as rows."""
        return {hash(repr(self.opening_messages(row))) for row in self.rows}

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EnvBase.all_tasks`: the rows."""
        self.start()
        for number, row in enumerate(self._rows.rows):
            yield self.where(number), row

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: each task of `all_tasks`, answered by `gold_reply`."""
        from rlpost.data.demonstrations import Demonstration

        for where, task in self.all_tasks():
            yield Demonstration(where, messages=self.answered(task))

    def answered(self, task: Mapping[str, Any]) -> list[Message]:
        """The conversation about `task` in which the policy says `gold_reply`, to which the environment replies."""
        gold = self.gold_reply(task)
        if isinstance(gold, str):
            return [*self.opening_messages(task), {"role": self.policy_role, "content": gold}]
        conversation = self.begun(task)
        for text in gold[:-1]:
            conversation.add_completion(Completion([], [], text, "stop", 0))
            self.respond([conversation])
        return [*conversation.messages, {"role": self.policy_role, "content": gold[-1]}]

    @property
    def has_gold(self) -> bool:
        """Whether replies to the tasks are right or wrong, and a right one of each is known."""
        return True

    def demonstrated(self) -> DemonstratedRows | None:
        """The demonstrations by number, each made when it is asked for; None where they are only made in turn."""
        return None

    def reset_dataloader(self) -> None:
        """Draw again from the first row on."""
        self.start()
        assert self.primer is not None
        self.primer.reset_dataloader()

    def set_seed(self, seed: int) -> None:
        """See `EnvBase.set_seed`."""
        self.seed = seed
        if self._rows is not None:
            self._rows = self.open_rows(seed)
            first = self.primer.next_group if self.primer is not None else 0
            self.primer = DataLoadingPrimer(self._rows, repeats=self.repeats, first_group=first)

    def state_dict(self) -> dict[str, Any]:
        """See `EnvBase.state_dict`; the seed and the number of rows say which order the position is one of."""
        self.start()
        return {**super().state_dict(), "seed": self.seed, "rows": self._rows.fingerprint(self.rows_served)}

    def initial_state(self) -> dict[str, Any]:
        """See `EnvBase.initial_state`."""
        return {**super().initial_state(), "rows": self._rows.fingerprint(0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `EnvBase.load_state_dict`. Raises DataError where the rows drawn are not those `state` was taken with."""
        self.start()
        self.set_seed(state["seed"])
        super().load_state_dict(state)
        if state["rows"] != (these := self._rows.fingerprint(self.rows_served)):
            raise DataError(
                f"the saved position was taken with {state['rows']}, and this dataset gives {these}: resume with the "
                "dataset and env settings the run began with; only rows that were not drawn yet may go"
            )

    @property
    def rows_served(self) -> int:
        """How many rows have been drawn; the copies of one count as one."""
        return 0 if self.primer is None else -(-self.primer.position // self.repeats)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value.name if isinstance(value, Enum) else value
