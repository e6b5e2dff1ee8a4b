"""The marker and the fixture ``ledger``, in suites that pytest runs: what is measured, what a broken budget says."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
import torch

import torchledger as tl
import torchledger.pytest_fixtures  # stays loaded, so that inner runs share it with this process
from torchledger.gate import marks

assert torch.__version__
assert torchledger.pytest_fixtures

# Without what collects garbage five times after each run, with all of torch in memory, and without an import that each
# inner run would make anew.
QUICK = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:hypothesispytest")

# A tensor of so many KiB, and nothing else: every number is known.
ONES = """
import pytest, torch
import torchledger as tl

def ones(kib):
    return torch.ones(kib * 256)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "TORCHLEDGER_REPORT", "TORCHLEDGER_TOLERANCE"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(suite: pytest.Pytester, code: str, *words: str) -> pytest.RunResult:
    suite.makepyfile(test_it=ONES + code)
    return suite.runpytest_inprocess(*QUICK, *words)


# What is measured


def test_the_whole_call_is_measured(suite: pytest.Pytester) -> None:
    code = """
    @pytest.mark.ledger(peak="4 KiB")
    def test_fits():
        ones(4)

    @pytest.mark.ledger(peak=4095)
    def test_does_not():
        ones(4)

    def test_without_budget():
        ones(400)
    """.replace("\n    ", "\n")
    result = run(suite, code)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_does_not _*",
            "peak 4.000 KiB > budget 3.999 KiB (+0.001 KiB, <0.1 %) on cpu (*), torch *",
            "At the peak of step 0*",
            "*4.00 KiB*aten.ones*outside*float32 1024",
            "To accept what was measured: peak=4096*",
            "FAILED test_it.py::test_does_not - BudgetExceeded: peak 4.000 KiB > budget *",
        ]
    )
    assert "pytest_fixtures.py" not in result.stdout.str()


def test_setup_and_teardown_are_not_measured(suite: pytest.Pytester) -> None:
    code = """
@pytest.fixture
def big():
    ones(100)
    yield ones(2)
    ones(100)

@pytest.mark.ledger(peak=2048 + 1024)
def test_it(big):
    big + 1 if False else ones(1) + big[:256]
"""
    result = run(suite, code)
    result.assert_outcomes(failed=1)  # ones, their sum and the 2 KiB that the op met: 4 KiB
    result.stdout.fnmatch_lines(["peak 4.00 KiB > budget 3.00 KiB (+1.00 KiB, +33.3 %) on cpu*"])


def test_each_ledger_of_the_fixture_is_held(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.ledger(peak="4 KiB")
def test_it(ledger):
    a = ones(100)
    with ledger() as first:
        ones(4)
    with ledger(keep=1) as second:
        ones(5)

@pytest.mark.ledger(peak="4 KiB")
def test_steps(ledger):
    with ledger() as books:
        for n in (1, 4, 2):
            ones(n)
            books.step()

@pytest.mark.ledger(peak="4 KiB")
def test_late(request):
    ones(100)
    with request.getfixturevalue("ledger")():
        ones(5)

@pytest.fixture
def books(ledger):
    with ledger() as books:
        yield books

@pytest.mark.ledger(peak="4 KiB")
def test_open(books):
    ones(5)
"""
    result = run(suite, code)
    result.assert_outcomes(passed=1, failed=3)
    assert result.stdout.str().count("\npeak 5.00 KiB > budget 4.00 KiB") == 3
    result.stdout.fnmatch_lines(["Measured by ledger 2 of the 2 of this test. To accept*"])


def test_a_fixture_without_a_ledger_is_no_silent_pass(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.ledger(peak="4 KiB")
def test_none(ledger):
    ones(5)

@pytest.mark.ledger(peak="4 KiB")
def test_never_entered(ledger):
    ledger()

def test_no_budget(ledger):
    pass

@pytest.mark.ledger(peak="4 KiB")
def test_no_torch():
    pass
"""
    result = run(suite, code)
    result.assert_outcomes(passed=2, failed=2, warnings=1)
    result.stdout.fnmatch_lines(["*made no ledger with it*", "*no step was recorded*", "*ran no op of torch*"])


def test_categories_have_peaks_of_their_own_and_flops_are_those_of_a_step(suite: pytest.Pytester) -> None:
    code = """
def train(books, steps=2):
    model = torch.nn.Linear(256, 1, bias=False)  # 1 KiB
    for _ in range(steps):
        model(torch.zeros(3, 256)).sum().backward()
        books.step()

@pytest.mark.ledger(parameters="1 KiB", gradients="1 KiB", inputs="3 KiB", flops=2 * 2 * 3 * 256,
                    recompute_flops=0, forward_flops=1536, model_flops="3072",
                    requested="1 MB", allocated="1 MB", reserved="1 MB", buffers=0)
def test_fits(ledger):
    with ledger() as books:
        train(books)

@pytest.mark.ledger(parameters=1023, gradients=1023, inputs=3071, flops=3071, forward_flops=1535, backward_flops=1535)
def test_does_not(ledger):
    with ledger() as books:
        train(books)
"""
    result = run(suite, code)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "parameters 1.000 KiB > budget 0.999 KiB (+0.001 KiB, +0.1 %)*",
            "gradients 1.000 KiB > budget 0.999 KiB*",
            "inputs 3.000 KiB > budget 2.999 KiB*",
            "flops 3.072 kFLOP > budget 3.071 kFLOP*",
            "forward_flops 1.536 kFLOP > budget 1.535 kFLOP*",
            "backward_flops 1.536 kFLOP > budget 1.535 kFLOP*",
            "FLOPs of step ? (forward 1.54 kFLOP, backward 1.54 kFLOP):",
        ]
    )


def test_tolerance(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.ledger(peak=1000, tolerance="2.4%")
def test_kept():
    ones(1)

@pytest.mark.ledger(peak=1000, tolerance="2.3%")
def test_broken():
    ones(1)
"""
    result = run(suite, code)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["peak 1.00 KiB > budget 0.98 KiB (+0.02 KiB, +2.4 %) on *; with its tolerance 1023 B"])


def test_what_is_not_counted_is_warned_of(suite: pytest.Pytester) -> None:
    code = """
@torch.library.custom_op("ledger_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@pytest.mark.ledger(flops="1 TFLOP")
def test_it():
    unknown(ones(1))

@pytest.mark.ledger(flops="1 TFLOP", uncounted_ops=0)
def test_strict():
    unknown(ones(1))

@pytest.mark.ledger(peak="1 GiB")
def test_many(ledger):
    with ledger(keep=2) as books:
        for _ in range(5):
            ones(1)
            books.step()
"""
    suite.makepyfile(test_it=ONES + code)
    result = suite.runpytest_subprocess()  # torch does not survive that modules of it are loaded twice
    result.assert_outcomes(passed=2, failed=1, warnings=2)
    result.stdout.fnmatch_lines(["uncounted_ops 1 > budget 0 (+1) on *"])
    result.stdout.fnmatch_lines(["*FLOPs are without ledger_tests.unknown (1 call), whose cost is unknown"])
    result.stdout.fnmatch_lines(["*of 5 steps * were kept*"])


# How markers come together


def test_the_nearest_marker_wins_and_keys_merge(suite: pytest.Pytester) -> None:
    suite.makepyprojecttoml('[tool.torchledger]\npeak = "1 KiB"\nother = "5 KiB"\n')
    code = """
pytestmark = pytest.mark.ledger(peak="2 KiB", flops=0)

def test_module():
    kept = ones(3)

@pytest.mark.ledger(peak="3 KiB")
class TestClass:
    def test_class(self):
        ones(3)

    @pytest.mark.ledger(peak="4 KiB")
    def test_function(self):
        ones(4)

    @pytest.mark.ledger(peak="6 KiB")
    def test_suite(self):
        self.kept = ones(6)

    @pytest.mark.ledger(peak="6 KiB")
    def test_flops(self):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    @pytest.mark.parametrize("n", [1, pytest.param(5, marks=pytest.mark.ledger(peak="4 KiB"))])
    @pytest.mark.ledger(peak="1 KiB")
    def test_parameter(self, n):
        ones(n)
"""
    result = run(suite, code, "-rA")
    lines = [
        "PASSED *test_class*",
        "PASSED *test_function*",
        "PASSED *test_parameter?1?",
        "FAILED *test_module - *peak 3.00 KiB*",
        "FAILED *test_suite - *other 6.00 KiB*",
        "FAILED *test_flops - *flops 16 *",
        "FAILED *test_parameter?5? - *peak 5.*",
    ]
    result.stdout.fnmatch_lines_random(lines)
    result.stdout.fnmatch_lines(["peak 5.00 KiB > budget 4.00 KiB *"])


def test_a_suite_wide_budget_holds_for_every_test(suite: pytest.Pytester) -> None:
    suite.makepyprojecttoml('[tool.torchledger]\npeak = "1 KiB"\n')
    result = run(suite, "def test_a(): ones(1)\ndef test_b(): ones(2)\ndef test_c(): pass\ndef test_d(ledger): pass\n")
    result.assert_outcomes(passed=3, failed=1, warnings=0)


def test_limits_by_parameter_id(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.parametrize("n", [1, 2], ids=["small", "große/../x"])
@pytest.mark.ledger(peak={"small": "1 KiB", "gro\\\\xdfe/../x": "2 KiB"}, flops=0)
def test_it(n):
    ones(n)

@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.ledger(peak={"1-1": 2048, "1-2": 3072, "2-1": 3072, "2-2": 4095})
def test_two(n, m):
    a, b = ones(n), ones(m)
"""
    result = run(suite, code)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["peak 4.000 KiB > budget 3.999 KiB*"])
    suite.runpytest_inprocess(*QUICK, "test_it.py::test_it[small]").assert_outcomes(passed=1)


def test_markers_that_are_added_while_collecting_or_running(suite: pytest.Pytester) -> None:
    suite.makeconftest(
        """
        import pytest
        def pytest_collection_modifyitems(items):
            items[0].add_marker(pytest.mark.ledger(peak=1))
        """
    )
    code = """
def test_a():
    ones(1)

@pytest.fixture
def strict(request):
    request.applymarker(pytest.mark.ledger(peak=1))

def test_b(strict):
    ones(1)
"""
    run(suite, code).assert_outcomes(failed=2)


# Wrong markers


# A value of somebody's own class: whatever it is asked, it raises. With entries it is a dict.
HOSTILE = """
def fail(*args):
    raise RuntimeError("hostile")

class Hostile:
    __repr__ = __index__ = __eq__ = __hash__ = fail
    def __new__(cls, **entries):
        return type("Entries", (dict,), {"items": fail})(**entries) if entries else super().__new__(cls)
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            'peak="24 MBananas"',
            "peak='24 MBananas'*cannot read '24 MBananas' as a size: write '2GiB', '1.5 GiB', '2GB'*",
        ),
        ('peak="10%"', "cannot read '10%' as a size: write '2GiB'*"),
        ("peak=-1", "cannot read -1 as a size*"),
        ('peak="2G"', "cannot read '2G' as a size*"),
        ('peak="2Gb"', "cannot read '2Gb' as a size*"),
        ('peak="2 GiB total"', "cannot read '2 GiB total' as a size*"),
        ('peak=""', "cannot read '' as a size*"),
        ("peak=None", "cannot read None as a size*"),
        ("peak=True", "cannot read True as a size*"),
        ("peak=1.5", "cannot read 1.5 as a size*"),
        ("peak=[1]", "cannot read ?1? as a size*"),
        ("peak=float('nan')", "cannot read nan as a size*"),
        ('flops="3 GiB"', "cannot read '3 GiB' as a number of FLOPs: write '3 TFLOP'*"),
        ("flops=-3", "cannot read -3 as a number of FLOPs*"),
        ("flops=float('inf')", "cannot read inf as a number of FLOPs*"),
        ("peek=1", "there is no quantity 'peek': did you mean 'peak'*"),
        ("activation='1 GiB'", "did you mean 'activations'*"),
        ("**{'a b': 1}", "there is no quantity 'a b'*"),
        ("'2 GiB'", "name each limit*"),
        ("tolerance=2, peak=1", "cannot read 2 as a tolerance: write '2%', '0.5 %' or 0*"),
        ("tolerance='-2%', peak=1", "cannot read '-2%' as a tolerance*"),
        ("tolerance='1 MiB', peak=1", "cannot read '1 MiB' as a tolerance*"),
        ("peak={}", "give a dict by parameter id*"),
        ("peak={1: 2}", "give a dict by parameter id*"),
        ("peak={'a': '2G'}", "peak={'a': '2G'}): cannot read '2G' as a size*"),
        ("peak={'a': 1}", "the test is not parametrised*"),
        ("peak={'a': {'b': 1}}", "cannot read {'b': 1} as a size*"),
        ("peak='9' * 5000", "cannot read '9999*"),
        ("peak=-(10**5000)", "(peak=int): cannot read int as a size*"),
        ("tolerance=10**5000, peak=1", "cannot read int as a tolerance*"),
        ("peak=Hostile()", "(peak=Hostile): cannot read Hostile as a size*"),
        ("peak={'a': Hostile()}", "{'a': Hostile}): cannot read Hostile as a size*"),
        ("tolerance=Hostile(), peak=1", "cannot read Hostile as a tolerance*"),
        ("Hostile()", "ledger(Hostile): name each limit*"),
        ("peak=Hostile(a=1)", "a value cannot be read (RuntimeError)*"),
        ("**{'p\\neak': 1}", "ledger('p?neak'=1): there is no quantity 'p?neak': did you mean 'peak'*"),
    ],
)
def test_a_bad_marker_is_a_usage_error_that_names_the_test(suite: pytest.Pytester, words: str, says: str) -> None:
    result = run(suite, f"{HOSTILE}\n@pytest.mark.ledger({words})\ndef test_naïve():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_it.py::test_naïve: *{says}"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    result.assert_outcomes()


def test_bad_markers_are_found_without_running_and_beside_each_other(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.parametrize("n", range(30))
@pytest.mark.ledger(peak="2G")
def test_a(n): pass

@pytest.mark.ledger(peek=1)
def test_b(): pass

def test_c(): pass
"""
    for words in ((), ("--collect-only",), ("-k", "test_a or test_b")):
        result = run(suite, code, *words)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: test_it.py::test_a?0?: *", "test_it.py::test_a?1?: *", "and 21 more"])


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ("{'1': 1}", "no value for the parameter id '2': there are '1'*"),
        ("{'1': 1, '2': 1, '3': 1}", "no parameter has the id '3': there are '1', '2'*"),
    ],
)
def test_unknown_parameter_ids(suite: pytest.Pytester, limits: str, says: str) -> None:
    code = f"""
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.ledger(peak={limits})
def test_it(n): pass
"""
    result = run(suite, code)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_it.py::test_it?*?: *{says}"])


def test_thousands_of_parameters_with_a_limit_each(suite: pytest.Pytester) -> None:
    code = """
IDS = [f"p{n}" for n in range(3000)]

@pytest.mark.parametrize("n", range(3000), ids=IDS)
@pytest.mark.ledger(peak={name: "1 KiB" for name in IDS})
def test_it(n):
    pass
"""
    began = time.process_time()
    result = run(suite, code, "--collect-only", "-q")
    assert result.ret == 0
    # What grows with the square or the cube of their number takes minutes here.
    assert time.process_time() - began < 30


def test_a_marker_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(marks, "parse_limits", lambda limits, where: calls.append(limits) or {})
    reader = marks.MarkReader()
    limits = {"peak": {"a": 1}}
    for _ in range(3):
        reader.read((), limits)
    assert len(calls) == 1


# The failure among other failures


def test_what_pytest_makes_of_a_broken_budget(suite: pytest.Pytester) -> None:
    code = """
over = pytest.mark.ledger(peak=1)

@over
def test_own_failure_comes_first():
    ones(1)
    assert 1 == 2, "its own"

@over
def test_skips_inside():
    ones(1)
    pytest.skip("inside")

@pytest.mark.xfail
@over
def test_xfail():
    ones(1)

@pytest.mark.xfail(strict=True)
@over
def test_strict():
    ones(1)

@pytest.mark.xfail(raises=tl.BudgetExceeded, strict=True)
@over
def test_raises():
    ones(1)

@pytest.mark.xfail(raises=AssertionError, strict=True)
@over
def test_raises_assertion():
    ones(1)

@pytest.mark.xfail(raises=KeyError)
@over
def test_raises_another():
    ones(1)

@pytest.mark.xfail(strict=True)
@pytest.mark.ledger(peak="1 GiB")
def test_strict_and_kept():
    ones(1)

@pytest.mark.xfail(run=False)
@over
def test_not_run():
    ones(1)

@pytest.mark.skip
@over
def test_skip():
    ones(1)
"""
    result = run(suite, code, "-rA")
    result.assert_outcomes(failed=3, skipped=2, xfailed=5)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED *test_own_failure_comes_first - AssertionError: its own*",
            "FAILED *test_raises_another - *peak 1.00 KiB > budg*",
            "FAILED *test_strict_and_kept*",
        ]
    )


def test_inside_the_test_the_failure_points_at_its_line(suite: pytest.Pytester) -> None:
    code = """
def test_report(ledger):
    with ledger() as books:
        ones(2)
    with pytest.raises(tl.BudgetExceeded, match="peak 2.00 KiB > budget 1.00 KiB"):
        books.report.check(tl.Budget(peak="1 KiB"))
    books.report.check(tl.Budget(peak="1 KiB"))  # this line

def test_loop(ledger):
    with ledger() as books:
        for n in range(1, 9):
            ones(n)
            books.step()
            books.assert_budget(peak="3 KiB")
    assert n == 4
"""
    result = run(suite, code)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [">       books.report.check(tl.Budget(peak=*# this line", "E *peak 2.00 KiB > budget*"]
    )
    result.stdout.fnmatch_lines(["> *books.assert_budget(peak=*", "E *peak 4.00 KiB > budget 3.00 KiB*"])
    assert "report.py" not in result.stdout.str()


def test_detail_grows_with_v(suite: pytest.Pytester) -> None:
    code = "@pytest.mark.ledger(peak=1)\ndef test_it():\n    ones(1)\n"
    assert "Bytes of step 0 on cpu by category" not in run(suite, code).stdout.str()
    run(suite, code, "-v").stdout.fnmatch_lines(["*- torchledger -*", "Bytes of step 0 on cpu by category"])


@pytest.mark.parametrize("style", ["auto", "long", "short", "line", "native", "no"])
def test_traceback_styles(suite: pytest.Pytester, style: str) -> None:
    result = run(suite, "@pytest.mark.ledger(peak=1)\ndef test_it():\n    ones(1)\n", f"--tb={style}")
    result.assert_outcomes(failed=1)
    if style != "no":
        result.stdout.fnmatch_lines(["*peak 1.00 KiB > budget 1 B*"])


def test_reruns(suite: pytest.Pytester) -> None:
    pytest.importorskip("pytest_rerunfailures")
    code = """
attempts = []

@pytest.mark.flaky(reruns=2)
@pytest.mark.ledger(peak="1 KiB")
def test_it(ledger):
    attempts.append(1)
    with ledger() as books:
        ones(4 - len(attempts))

@pytest.mark.flaky(reruns=1, only_rerun=["BudgetExceeded"])
@pytest.mark.ledger(peak="1 KiB")
def test_never():
    ones(2)
"""
    result = run(suite, code, "--junitxml=junit.xml", "--ledger-report=r.json")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*1 failed, 1 passed, 3 rerun*"])
    cases = {case.get("name"): case for case in ElementTree.parse(suite.path / "junit.xml").iter("testcase")}
    peaks = [p.get("value") for p in cases["test_it"].iter("property") if p.get("name") == "torchledger.peak_bytes"]
    assert peaks == ["1024"]


# Kinds of tests


def test_unittest_classes(suite: pytest.Pytester) -> None:
    code = """
import unittest

class TestCase(unittest.TestCase):
    def setUp(self):
        ones(100)

    def tearDown(self):
        ones(100)

    @pytest.mark.ledger(peak="2 KiB")
    def test_fits(self):
        ones(2)

    @pytest.mark.ledger(peak="2 KiB")
    def test_over(self):
        ones(3)

    @pytest.mark.ledger(peak="2 KiB")
    def test_own_failure(self):
        ones(3)
        self.assertEqual(1, 2)

    @pytest.mark.ledger(peak="2 KiB")
    def test_skip(self):
        ones(3)
        self.skipTest("inside")

    @unittest.expectedFailure
    @pytest.mark.ledger(peak="2 KiB")
    def test_expected(self):
        ones(3)

    @pytest.fixture(autouse=True)
    def _give(self, request):
        if request.node.name == "test_fixture":
            self.ledger = request.getfixturevalue("ledger")

    @pytest.mark.ledger(peak="2 KiB")
    def test_fixture(self):
        with self.ledger():
            ones(3)

class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        ones(100)

    @pytest.mark.ledger(peak="2 KiB")
    async def test_fits(self):
        ones(2)

    @pytest.mark.ledger(peak="2 KiB")
    async def test_over(self):
        ones(3)
"""
    result = run(suite, code, "-rA")
    result.assert_outcomes(passed=2, failed=4, skipped=1, xfailed=1)
    assert result.stdout.str().count("peak 3.00 KiB > budget 2.00 KiB (+1.00 KiB, +50.0 %)") == 3
    result.stdout.fnmatch_lines(["FAILED *::test_own_failure - AssertionError: 1 != 2"])


def test_async_tests(suite: pytest.Pytester) -> None:
    pytest.importorskip("anyio")
    code = """
import asyncio
pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.ledger(peak="2 KiB")
async def test_fits():
    await asyncio.sleep(0)
    ones(2)

@pytest.mark.ledger(peak="2 KiB")
async def test_over():
    await asyncio.sleep(0)
    ones(3)

@pytest.mark.ledger(peak="2 KiB")
async def test_fixture(ledger):
    ones(100)
    with ledger():
        await asyncio.sleep(0)
        ones(3)
"""
    result = run(suite, code)
    result.assert_outcomes(passed=1, failed=2)
    assert result.stdout.str().count("peak 3.00 KiB > budget 2.00 KiB") == 2


def test_doctests(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        mod='''
        def fits():
            """
            >>> import torch
            >>> torch.ones(256).shape
            torch.Size([256])
            """

        def over():
            """
            >>> import torch
            >>> _ = torch.ones(512)
            """

        def fixture():
            """
            >>> import torch
            >>> with getfixture("ledger")() as books:
            ...     _ = torch.ones(512)
            >>> getfixture("ledger_baseline").check(books.report)[0].key
            'peak'
            """

        def wrong():
            """
            >>> import torch
            >>> _ = torch.ones(512)
            >>> 1
            2
            """
        '''
    )
    suite.makeconftest(
        """
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                if "fixture" not in item.name:
                    item.add_marker(pytest.mark.ledger(peak="1 KiB"))
        """
    )
    result = suite.runpytest_inprocess(*QUICK, "--doctest-modules", "mod.py")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["peak 2.00 KiB > budget 1.00 KiB*"])
    result.stdout.fnmatch_lines(["NEW mod.py::mod.fixture: written to __ledger__/mod.json"])


def test_a_project_may_have_a_fixture_of_the_same_name(suite: pytest.Pytester) -> None:
    code = """
@pytest.fixture
def ledger():
    return "theirs"

@pytest.mark.ledger(peak="1 KiB")
def test_it(ledger):
    assert ledger == "theirs"
    ones(2)
"""
    run(suite, code).assert_outcomes(failed=1)


def test_a_ledger_of_the_tests_own_inside_the_measured_call(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.ledger(peak="1 KiB")
def test_it():
    with tl.Ledger() as inner:
        ones(2)
    assert inner.report.peak.total_bytes == 2048
"""
    result = run(suite, code)
    result.stdout.fnmatch_lines(["peak 2.00 KiB > budget 1.00 KiB*"])


# What is handed on


def test_properties_and_reports(suite: pytest.Pytester) -> None:
    code = """
@pytest.mark.ledger(peak="1 MiB")
def test_one(record_property):
    record_property("theirs", "x")
    torch.mm(torch.ones(4, 8), torch.ones(8, 2))

@pytest.mark.ledger(peak=1)
@pytest.mark.parametrize("name", ["a/b", "../../x", 'say "hi"', "ü"])
def test_two(ledger, name):
    with ledger(): ones(1)
    with ledger(): ones(2)

@pytest.mark.ledger
def test_only_measured():
    ones(3)

def test_nothing():
    ones(1)
"""
    result = run(suite, code, "--junitxml=junit.xml", "--ledger-report=out.json")
    result.assert_outcomes(passed=3, failed=4)
    found = {}
    for case in ElementTree.parse(suite.path / "junit.xml").iter("testcase"):
        found[case.get("name")] = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert found["test_one"]["torchledger.flops"] == str(2 * 4 * 8 * 2)
    assert found["test_one"]["torchledger.peak_bytes"] == str(4 * (4 * 8 + 8 * 2 + 4 * 2))
    assert found["test_one"]["theirs"] == "x"
    assert found["test_two[a/b]"]["torchledger.peak_bytes"] == "1024"
    assert found["test_two[a/b]"]["torchledger.2.peak_bytes"] == "2048"
    assert "test_nothing" not in found or not found["test_nothing"]
    document = json.loads((suite.path / "out.json").read_text("utf-8"))
    assert (document["schema"], document["kind"]) == (1, "torchledger-reports")
    assert len(document["reports"]) == 1 + 2 * 4 + 1
    assert "test_it.py::test_two[../../x]#2" in document["reports"]
    for report in document["reports"].values():
        assert tl.Report.from_dict(report).n_steps == 1
    assert tl.Report.from_dict(document["reports"]["test_it.py::test_only_measured"]).peak.total_bytes == 3072
    assert sorted(path.name for path in suite.path.iterdir()) == ["junit.xml", "out.json", "test_it.py"]


def test_a_report_that_cannot_be_written_is_known_before_the_run(suite: pytest.Pytester) -> None:
    result = run(suite, "def test_it(): pass\n", "--ledger-report=no/such/folder.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: cannot write *folder.json: its folder does not exist*"])


def test_a_broken_budget_survives_pickling() -> None:
    with tl.Ledger() as books:
        kept = torch.ones(2)
    with pytest.raises(tl.BudgetExceeded) as caught:
        books.report.check(tl.Budget(peak=1))
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.key, error.measured, error.budget, error.device) == ("peak", 8, 1, "cpu")
    assert str(error) == str(caught.value)
    assert kept.shape == (2,)


def test_what_a_test_measured_is_let_go_of(suite: pytest.Pytester) -> None:
    code = """
import gc
from torchledger.pytest_fixtures import Watch

@pytest.mark.parametrize("n", range(20))
@pytest.mark.ledger(peak="1 GiB")
def test_it(n):
    ones(1)

def test_last():
    gc.collect()
    assert [x for x in gc.get_objects() if type(x) is Watch] == []
"""
    suite.makepyfile(test_it=ONES + code)
    suite.runpytest_subprocess(*QUICK).assert_outcomes(passed=21)


# A suite that uses nothing of this


def test_a_suite_without_budgets_sees_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import sys
        def test_it(request):
            assert "torch" not in sys.modules
            heavy = ("torchledger.gate.budgets", "torchledger.gate.session", "torchledger.report", "tomllib")
            assert [name for name in heavy if name in sys.modules and name != "tomllib"] == []
        """
    )
    suite.makepyprojecttoml('[project]\nname = "x"\n')
    result = suite.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    text = result.stdout.str()
    assert [line for line in text.splitlines() if "ledger" in line and not line.startswith("plugins:")] == []
    plain = suite.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:torchledger.pytest_plugin")
    assert len(plain.outlines) == len(result.outlines)


def test_the_plugin_can_be_left_out(suite: pytest.Pytester) -> None:
    code = "@pytest.mark.ledger(peak=1)\ndef test_it(request):\n    ones(1)\ndef test_fixture(ledger): pass\n"
    suite.makepyfile(test_it=ONES + code)
    result = suite.runpytest_subprocess(*QUICK, "-p", "no:torchledger.pytest_plugin", "-W", "ignore")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["E *fixture 'ledger' not found"])


def test_importing_the_plugin_is_cheap() -> None:
    code = (
        "import pytest, sys; before = set(sys.modules); import torchledger.pytest_plugin\n"
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("torchledger")}
    assert ours == {
        "torchledger",
        "torchledger._version",
        "torchledger.errors",
        "torchledger.gate",
        "torchledger.gate.config",
        "torchledger.pytest_plugin",
        "torchledger.pytest_run",
    }
    assert "torch" not in done.stdout.split()


def test_the_plugin_can_be_named_as_well(suite: pytest.Pytester) -> None:
    code = "@pytest.mark.ledger(peak=1)\ndef test_it():\n    ones(1)\n"
    suite.makepyfile(test_it=ONES + code)
    suite.runpytest_subprocess("-p", "torchledger.pytest_plugin", "--strict-markers").assert_outcomes(failed=1)


def test_a_marked_test_of_several_steps_is_held_by_the_step(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest, torch

        STEP = 2 * 2 * 8 * 16 * 4  # a forward and a weight gradient

        @pytest.fixture
        def made():
            model = torch.nn.Linear(16, 4, bias=False)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        @pytest.mark.ledger(flops=STEP)
        def test_closures(made):
            model, optimizer = made
            def closure():
                optimizer.zero_grad()
                loss = model(torch.randn(8, 16)).sum()
                loss.backward()
                return loss
            for _ in range(3):
                optimizer.step(closure)

        @pytest.mark.ledger(flops=STEP)
        def test_by_hand():
            model = torch.nn.Linear(16, 4, bias=False)
            for _ in range(3):
                model(torch.randn(8, 16)).sum().backward()
                for p in model.parameters():
                    p.data -= 0.1 * p.grad
                    p.grad = None

        @pytest.mark.ledger(flops=STEP - 1)
        def test_too_much(made):
            model, optimizer = made
            for _ in range(3):
                model(torch.randn(8, 16)).sum().backward()
                optimizer.step()
        """
    )
    suite.runpytest_subprocess("-n", "0").assert_outcomes(passed=2, failed=1)
