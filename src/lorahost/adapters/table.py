"""All registered names: lookup by name or alias, limits on their number, and the records for readers."""

from __future__ import annotations

from collections.abc import Callable

from lorahost.adapters import events
from lorahost.adapters.entries import Entry, Wanted
from lorahost.adapters.versions import AdapterRecord
from lorahost.core import Json
from lorahost.errors import AdapterConflictError, AdapterNotFoundError, CapacityError


class AdapterTable:
    """Entries belong to the loop; `records` and `resolve` may be read from any thread."""

    def __init__(
        self,
        *,
        max_adapters: int,
        max_loras: int,
        max_cpu_loras: int,
        emit: events.Emit,
        held: Callable[[], int],
    ) -> None:
        self._max_adapters = max_adapters
        self._max_loras = max_loras
        self._max_cpu_loras = max_cpu_loras
        self._emit = emit
        self._held = held
        self.entries: dict[str, Entry] = {}
        self._records: dict[str, AdapterRecord] = {}
        self._aliases: dict[str, frozenset[str]] = {}

    def records(self) -> list[AdapterRecord]:
        """Snapshots of all adapters, the failed and the draining ones too."""
        return list(self._records.values())

    def record(self, name: str) -> AdapterRecord:
        """Raises AdapterNotFoundError."""
        record = self._records.get(name)
        if record is None:
            raise not_found(name)
        return record

    def resolve(self, name_or_alias: str) -> str | None:
        """Canonical name, or None.

        Raises:
            AdapterConflictError: several adapters have this alias; guessing would serve the wrong one.
        """
        record = self._records.get(name_or_alias)
        if record is not None and record.state != "draining":
            return record.name
        names = self._aliases.get(name_or_alias, frozenset())
        if len(names) > 1:
            raise AdapterConflictError(
                f"alias {name_or_alias!r} belongs to several: {', '.join(sorted(names))}; use a name",
                code="ambiguous_alias",
                param="model",
            )
        return next(iter(names), None)

    def find(self, name_or_alias: str) -> Entry:
        """The entry that answers requests for `name_or_alias`; raises AdapterNotFoundError."""
        name = self.resolve(name_or_alias)
        entry = self.entries.get(name) if name is not None else None
        if entry is None or entry.removed.is_set():
            raise not_found(name_or_alias)
        return entry

    def current(self, name: str) -> Entry:
        """The entry of exactly this name that is not being removed; raises AdapterNotFoundError."""
        entry = self.entries.get(name)
        if entry is None or entry.removed.is_set():
            raise not_found(name)
        return entry

    def add(self, name: str, wanted: Wanted) -> Entry:
        """A new entry, in place of one that is being removed.

        Raises:
            CapacityError: max_adapters are registered.
        """
        self._check_room(name)
        failed = [e for e in self.entries.values() if e.failure is not None and e.live is None]
        # Failed adapters stay listed for their reason, but not without bound.
        for entry in failed[: max(0, len(failed) - self._max_adapters)]:
            self.drop(entry)
        former = self.entries.pop(name, None)
        entry = self.entries[name] = Entry(name, wanted, former=former)
        self.publish(entry)
        return entry

    def check_alias(self, name: str, alias: str | None) -> None:
        """One word must mean one adapter.

        Raises:
            AdapterConflictError: the alias is another adapter's name, or the name another adapter's alias.
        """
        if alias is not None and alias != name and alias in self.entries:
            raise AdapterConflictError(
                f"alias {alias!r} of adapter {name!r} is the name of another adapter", code="alias_taken", param="alias"
            )
        others = sorted(self._aliases.get(name, frozenset()) - {name})
        if others:
            raise AdapterConflictError(
                f"name {name!r} is the alias of adapter {others[0]!r}", code="name_taken", param="name"
            )

    def restart(self, entry: Entry, wanted: Wanted) -> None:
        """A registration of an existing entry is on its way; one that had failed counts again from now on.

        Raises:
            CapacityError: max_adapters are registered.
        """
        if entry.failure is not None and entry.live is None and not entry.removed.is_set():
            self._check_room(entry.name)
        entry.restart(wanted)
        self.publish(entry)

    def _check_room(self, name: str) -> None:
        entries = [e for e in self.entries.values() if not e.removed.is_set()]
        serving = sum(e.failure is None or e.live is not None for e in entries)
        if serving >= self._max_adapters:
            raise CapacityError(
                f"adapter {name!r} would be number {serving + 1}; max_adapters is {self._max_adapters}",
                details={**self.counts(), "adapters": serving, "max_adapters": self._max_adapters},
            )

    def reserve_pin(self, entry: Entry) -> None:
        """Counts `entry` as pinned from now on.

        Raises:
            CapacityError: max_loras - 1 are pinned.
        """
        others = sum(e.pinned for e in self.entries.values() if e is not entry)
        if others >= self._max_loras - 1:
            raise CapacityError(
                f"adapter {entry.name!r} can't be pinned: {others} are, of at most max_loras - 1 = "
                f"{self._max_loras - 1}",
                code="too_many_pins",
                param="pin",
                details=self.counts(),
            )
        entry.pin_wanted = True

    def counts(self) -> Json:
        """The numbers behind a CapacityError."""
        return {
            "loaded": self._held(),
            "max_loras": self._max_loras,
            "max_cpu_loras": self._max_cpu_loras,
            "pinned": sum(e.pinned for e in self.entries.values()),
        }

    def publish(self, entry: Entry) -> None:
        """Makes the present state of `entry`, or of the one that replaced it, visible."""
        current = self.entries.get(entry.name)
        if current is None:
            return
        entry = current
        if entry.former is not None and not entry.former.leaving() and entry.former.withdrawn:
            entry.former = None
        before, after = self._records.get(entry.name), entry.record()
        self._records[entry.name] = after
        self._index(before, after)
        if before is None or before.state != after.state:
            self._emit(events.StateChanged(entry.name, before.state if before else None, after.state, after.reason))

    def drop(self, entry: Entry) -> None:
        """Forgets `entry`, unless it was replaced already."""
        if self.entries.get(entry.name) is entry:
            former = entry.former
            if former is not None and former.leaving():
                # Its requests still run: it is listed until they end.
                self.entries[entry.name] = former
                self.publish(former)
                return
            del self.entries[entry.name]
            before = self._records.pop(entry.name)
            self._index(before, None)
            self._emit(events.StateChanged(entry.name, before.state, None))

    def _index(self, before: AdapterRecord | None, after: AdapterRecord | None) -> None:
        old, new = _visible_alias(before), _visible_alias(after)
        if old == new:
            return
        aliases: dict[str, frozenset[str]] = {}
        for record in self._records.values():
            alias = _visible_alias(record)
            if alias is not None:
                aliases[alias] = aliases.get(alias, frozenset()) | {record.name}
        self._aliases = aliases


def _visible_alias(record: AdapterRecord | None) -> str | None:
    return record.alias if record is not None and record.state != "draining" else None


def not_found(name: str) -> AdapterNotFoundError:
    """The answer to a name that nobody registered."""
    return AdapterNotFoundError(f"no adapter is registered as {name!r}", param="name")
