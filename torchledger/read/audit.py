"""What ops held inside themselves: the allocator's own events of a step, less what the ledger counted in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from torchledger.journal.calls import BETWEEN_OPS, Call
from torchledger.journal.entries import EXTERNAL, LATE, Journal
from torchledger.journal.rows import AuditedPeak, AuditRow
from torchledger.read.events import repaired
from torchledger.read.snapshots import there_before

AUDIT_ROWS = 1000
"""How many rows an audit has at most: the largest ones."""


def read_audit(journal: Journal, calls: list[Call]) -> tuple[tuple[AuditRow, ...], AuditedPeak | None]:
    """Rows of the ops that held bytes inside themselves on the CPU, largest first; and the step's peak with them.

    A call's bytes are what the allocator had given at the call's highest instant, less what the ledger counts when the
    op has returned: its count then and the call's bytes add up to what was held.
    """
    auditor = _Auditor(journal)
    ends = [*(call.begin for call in calls[1:]), len(journal.events)]
    for call, until in zip(calls, ends, strict=True):
        if call.inside or call.after or call.begin < until:
            auditor.read(call, until)
    auditor.post_gap(0)
    rows = sorted(auditor.rows.items(), key=lambda item: (-item[1][0], item[0]))[:AUDIT_ROWS]
    paths = journal.modules
    return (
        tuple(AuditRow(op, paths[module], phase, nbytes, n) for (op, module, phase), (nbytes, n) in rows),
        auditor.peak,
    )


class _Held:
    """What a span of allocator events leaves: sizes still held, and how much was held at its highest instant."""

    def __init__(self, sizes: Iterable[int], went: Counter[int], kept: Counter[int]) -> None:
        self.own: Counter[int] = Counter()
        """Sizes that were given in the span and are still held."""
        self.total = self.highest = 0
        self.freed = 0
        """Bytes of blocks of the ledger that went."""
        self.unkept = 0
        """Bytes that went of what no block claims, given before the span."""
        self.own_highest = own = 0
        for size in sizes:
            self.total += size
            self.highest = max(self.highest, self.total)
            if size > 0:
                self.own[size] += 1
                own += size
                self.own_highest = max(self.own_highest, own)
            elif went[-size] > 0:
                went[-size] -= 1
                self.freed -= size
            elif self.own[-size] > 0:
                self.own[-size] -= 1
                own += size
            elif kept[-size] > 0:
                kept[-size] -= 1
                self.unkept -= size


class _Auditor:
    """Goes through the calls of a step in order."""

    def __init__(self, journal: Journal) -> None:
        self.rows: dict[tuple[str, int, str], list[int]] = {}
        """Most bytes and number of calls, by op, module and phase."""
        self._journal = journal
        self._alive = _alive_bytes(journal)
        """What the ledger counts after so many events."""
        self._added_into = _added_into(journal)
        self._kept: Counter[int] = Counter()
        """Sizes of what is held and that no block claims."""
        self._kept_bytes = 0
        self._next = journal.first
        self._phase = "outside"
        self._gap: tuple[str, int, str, int] | None = None
        self.peak: AuditedPeak | None = None
        self._see(self._alive[0], 0, "", "", 0)

    def read(self, call: Call, until: int) -> None:
        """Read a call and what follows it, up to event number ``until``."""
        self._phase = call.phase or self._phase
        self._claim_late(call.begin, until)
        kept_before = self._kept_bytes
        base = self._alive[call.begin] + kept_before
        base -= sum(n for position, n in self._added_into.items() if call.end <= position < until)
        inside = _Held(call.inside, self._went(call.begin, call.end), self._kept)
        after = _Held(call.after, self._went(call.end, until), self._kept)
        self._kept_bytes -= inside.unkept + after.unkept
        claimed, claimed_after, claimed_kept = self._claim(call.begin, until, inside.own, after.own)
        self.post_gap(claimed_kept)
        if (hidden := inside.highest - claimed + inside.freed) > 0:
            self._post(call.op, call.module, call.phase, hidden)
        if (later := after.own_highest - claimed_after) > 0:
            self._gap = (call.then, call.then_module, self._phase, later)
        for held in (inside.own, after.own):
            self._kept += held
            self._kept_bytes += sum(size * n for size, n in held.items())
        returned = self._returned(call.end, until)
        highest = base + inside.highest
        self._see(highest, highest - returned, call.op, call.phase, call.module)
        highest = base + inside.total + after.highest
        self._see(highest, kept_before + later, call.then, self._phase, call.then_module)
        self._see(returned + self._kept_bytes, self._kept_bytes, call.op, call.phase, call.module)

    def post_gap(self, claimed: int) -> None:
        """Post what was held between ops, but for what a block has claimed since."""
        if self._gap is not None and self._gap[3] > claimed:
            self._post(*self._gap[:3], self._gap[3] - claimed)
        self._gap = None

    def _post(self, op: str, module: int, phase: str, nbytes: int) -> None:
        row = self.rows.setdefault((op or BETWEEN_OPS, module, phase), [0, 0])
        row[0] = max(row[0], nbytes)
        row[1] += 1

    def _see(self, total: int, inside: int, op: str, phase: str, module: int) -> None:
        """An instant, which may be the highest one."""
        if self.peak is None or total > self.peak.total_bytes:
            path = self._journal.modules[module] if op else ""
            self.peak = AuditedPeak(total, min(max(inside, 0), total), phase, path, op)

    def _claim(self, begin: int, until: int, own: Counter[int], new: Counter[int]) -> tuple[int, int, int]:
        """Bytes of the blocks that came, by whether the call, what followed it, or what came before it had them."""
        claimed = [0, 0, 0]
        for event in self._journal.events[begin:until]:
            size = self._size(event) if event >= 0 else 0
            for i, held in enumerate((own, new, self._kept)):
                if size and held[size] > 0:
                    held[size] -= 1
                    claimed[i] += size
                    break
        self._kept_bytes -= claimed[2]
        return claimed[0], claimed[1], claimed[2]

    def _claim_late(self, begin: int, until: int) -> None:
        """Claim what was allocated unseen and met by the op, before its own results came: a Python number, boxed."""
        came = [event for event in self._journal.events[begin:until] if event >= 0]
        if not came:
            return
        for number in range(self._next, came[0]):
            size = _cpu_bytes(self._journal, number) if self._journal.roles.get(number, 0) & LATE else 0
            if size and self._kept[size] > 0:
                self._kept[size] -= 1
                self._kept_bytes -= size
        self._next = came[-1] + 1

    def _went(self, begin: int, end: int) -> Counter[int]:
        """Sizes of the blocks that went and whose coming the allocator told of."""
        roles = self._journal.roles
        went = (event for event in self._journal.events[begin:end] if event < 0)
        return Counter(self._size(event) for event in went if not roles.get(~event, 0) & LATE)

    def _returned(self, end: int, until: int) -> int:
        """What the ledger counts when an op's results have come."""
        events = self._journal.events
        came = end
        while came < until and events[came] >= 0:
            came += 1
        return max(self._alive[end : min(came + 1, until) + 1])

    def _size(self, event: int) -> int:
        """Bytes of an event's block on the CPU, 0 for one elsewhere."""
        return _cpu_bytes(self._journal, event if event >= 0 else ~event)


def _cpu_bytes(journal: Journal, number: int) -> int:
    row = journal.blocks[number - journal.first] if number >= journal.first else journal.carried[number]
    return row[0] if row[1] == "cpu" and not journal.roles.get(number, 0) & EXTERNAL else 0


def _alive_bytes(journal: Journal) -> list[int]:
    start = sum(_cpu_bytes(journal, number) for number, _ in there_before(journal))
    changes = (
        _cpu_bytes(journal, event) if event >= 0 else -_cpu_bytes(journal, ~event) for event in repaired(journal).events
    )
    return list(accumulate(changes, initial=start))


def _added_into(journal: Journal) -> dict[int, int]:
    """Bytes of the blocks whose place a sum took, by the position of the sum's coming."""
    events = repaired(journal).events
    return {
        position: _cpu_bytes(journal, old)
        for position, old in journal.inplace_adds
        if position < len(events) and events[position] == ~old
    }
