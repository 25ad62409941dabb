"""Several hosts: their options, their meeting, and the operations that host 0 sends.

`tests/parallel/test_several_hosts.py` runs whole servers.
"""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from lora_files import write_adapter

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.config.options import split_address
from forge_jax.engine.hosts import group as groups
from forge_jax.engine.hosts.group import HostGroup
from forge_jax.engine.hosts.messages import Begin, Join, Peer, Reject
from forge_jax.errors import ConfigError, EngineError
from forge_jax.grammar import GrammarSpec
from forge_jax.step.mirror import Run, UpdateSlots, replay
from forge_jax.step.runner import Runner
from forge_jax.testing import core_of

HERE = "127.0.0.1"
TWO = {"num_hosts": 2, "tensor_parallel": 2, "coordinator": "10.0.0.1:5000"}


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hosts": 0}, "num_hosts must be at least 1"),
        ({"host_rank": 1}, "host_rank must be from 0 to 0"),
        (TWO | {"host_rank": 2}, "host_rank must be from 0 to 1"),
        (TWO | {"host_rank": -1}, "host_rank must be from 0 to 1"),
        ({"coordinator": "a:1"}, "coordinator needs num_hosts"),
        (TWO | {"coordinator": None}, "needs coordinator HOST:PORT"),
        (TWO | {"coordinator": "10.0.0.1"}, "coordinator must be HOST:PORT, not '10.0.0.1'"),
        (TWO | {"coordinator": ":5000"}, "coordinator must be HOST:PORT"),
        (TWO | {"coordinator": "a:65536"}, "coordinator must be HOST:PORT"),
        (TWO | {"tensor_parallel": 3}, "tensor_parallel=3 is the number of devices of all 2 hosts"),
        (
            TWO | {"draft_model": "forge-tiny", "speculation": "draft"},
            "draft_model does not work with num_hosts",
        ),
    ],
)
def test_invalid_options_name_the_remedy(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


def test_coordinator_may_be_an_ipv6_address():
    assert split_address("[fd00::1]:5000") == ("fd00::1", 5000)


def test_offline_api_rejects_several_hosts(short_stories):
    with pytest.raises(ConfigError, match="forge-jax serve only"):
        LLM(short_stories, **TWO)


# --- the meeting -------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def keep():
    """Return a function that returns its argument, a connection, which is closed at the end."""
    with contextlib.ExitStack() as opened:
        yield lambda peer: opened.enter_context(contextlib.closing(peer))


def test_hosts_are_ordered_by_rank(port, keep):
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(groups._gather, HERE, port, 3)
        second = keep(groups._connect(HERE, port, 2))
        first = keep(groups._connect(HERE, port, 1))
        for number, peer in enumerate(gathering.result(10)):
            keep(peer).send(Begin(number))
    assert (first.receive(5), second.receive(5)) == (Begin(0), Begin(1))


def test_restarted_host_replaces_its_earlier_connection(port, keep):
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(groups._gather, HERE, port, 3)
        earlier = keep(groups._connect(HERE, port, 1))
        later = keep(groups._connect(HERE, port, 1))
        keep(groups._connect(HERE, port, 2))
        for number, peer in enumerate(gathering.result(10)):
            keep(peer).send(Begin(number))
    assert later.receive(5) == Begin(0)
    with pytest.raises(OSError):
        earlier.receive(5)


def test_unusable_hosts_are_rejected_with_the_reason(port, keep):
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(groups._gather, HERE, port, 3)
        first = keep(groups._connect(HERE, port, 1))  # returns as soon as host 0 listens
        old, beyond, garbage = (
            keep(Peer(socket.create_connection((HERE, port)))) for _ in range(3)
        )
        old.send(Join(2, "0.0.1"))
        beyond.send(Join(3, forge_jax.__version__))
        garbage._sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        second = keep(groups._connect(HERE, port, 2))
        for number, peer in enumerate(gathering.result(30)):
            keep(peer).send(Begin(number))
    for rejected, reason in ((old, "install the same version"), (beyond, "--num-hosts 3")):
        answer = rejected.receive(5)
        assert isinstance(answer, Reject) and reason in answer.message
    with pytest.raises(OSError):
        garbage.receive(5)
    assert (first.receive(5), second.receive(5)) == (Begin(0), Begin(1))


def test_coordinator_address_of_another_host_is_rejected(port):
    with pytest.raises(ConfigError, match="host 0 cannot listen there"):
        groups._gather("192.0.2.1", port, 2)


def test_host_0_waits_for_the_name_of_the_coordinator(port, keep, monkeypatch):
    resolve, calls = socket.getaddrinfo, []

    def resolve_later(host, *args, **kwargs):
        calls.append(host)
        if len(calls) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(groups, "CONNECT_PAUSE_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", resolve_later)
    keep(groups._listen("localhost", port))
    assert calls == ["localhost"] * 3


def test_name_that_never_resolves_is_rejected(port, monkeypatch):
    monkeypatch.setattr(groups, "RESOLVE_S", 0.0)
    with pytest.raises(ConfigError, match="host 0 cannot listen there"):
        groups._listen("no-such-host.invalid", port)


@pytest.fixture
def both():
    """Return the groups of two hosts, as host 0 and host 1 see them."""
    with socket.create_server((HERE, 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    yield HostGroup(0, [Peer(ours)]), HostGroup(1, [Peer(theirs)])
    ours.close()
    theirs.close()


def together(both, call):
    """Return the results, or errors, of a call on both hosts at once."""
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call, group) for group in both]
        return [each.exception(10) or each.result() for each in calls]


def test_hosts_agree_on_the_smallest_number(both):
    assert together(both, lambda group: group.smallest([30, 20][group.rank])) == [20, 20]
    assert together(both, lambda group: group.smallest([-5, 20][group.rank])) == [-5, -5]


def test_equal_hosts_are_the_same(both):
    assert together(both, lambda group: group.check_same({"jax": "1", "x": [1, None]})) == [
        None,
        None,
    ]


def test_both_hosts_report_the_first_difference(both):
    errors = together(both, lambda group: group.check_same({"jax": "1", "--dtype": group.rank}))
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "host 1 differs from host 0 in --dtype: 1 instead of 0" in str(error)


def test_lost_host_is_noticed_while_nothing_is_sent(both):
    class Runner:
        mirror = None

    lost = threading.Event()
    both[0].lead(Runner(), lambda error: lost.set())
    assert not lost.wait(0.1)
    both[1]._peers[0].close()
    assert lost.wait(10)


def test_agreeing_with_a_lost_host_is_an_error(both):
    both[1]._peers[0].close()
    with pytest.raises(EngineError, match="a host is lost"):
        both[0].smallest(1)


# --- operations --------------------------------------------------------------------------------


class Recorder:
    """A mirror that sends operations over a connection and returns them as received."""

    def __init__(self, both):
        self._leader, self._follower = both
        self.received = []

    def send(self, operation):
        self._leader.send(operation)
        self.received.append(self._follower._peers[0].receive(5))


def runner_of(llm):
    runner = core_of(llm).device
    assert isinstance(runner, Runner)
    return runner


@pytest.fixture
def runners(short_stories, tmp_path, both):
    """Return an engine whose operations are recorded, the record, and another engine's runner."""
    adapter = write_adapter(tmp_path / "a", short_stories, seed=1, rank=4, alpha=8.0)
    options = {
        **{"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 64, "dtype": "float32"},
        **{"kernels": "xla", "max_loras": 1, "max_lora_rank": 4, "speculation": "ngram"},
    }
    with LLM(short_stories, **options) as llm, LLM(short_stories, **options) as other:
        recorder = Recorder(both)
        leader, follower = runner_of(llm), runner_of(other)
        leader.mirror = recorder
        yield llm, recorder.received, follower, adapter


@pytest.mark.slow
def test_replayed_operations_give_the_same_device_state(runners):
    llm, operations, follower, adapter = runners
    leader = runner_of(llm)
    llm.load_lora("a", adapter)
    params = [
        SamplingParams(max_tokens=20, seed=1),
        SamplingParams(max_tokens=20, temperature=0, presence_penalty=1.0, logit_bias={5: 1.0}),
        SamplingParams(max_tokens=20, structured_outputs=GrammarSpec.regex("[a-z ]{5,40}")),
        SamplingParams(max_tokens=20, n=2, seed=3),
    ]
    prompts = ["Once upon a time", "The dog", "A girl", "The cat and the cat and the cat and"]
    llm.generate(prompts, params, lora=["a", None, None, "a"], progress=False)
    llm.embed(["The dog", "Once upon a time, there was a girl"], progress=False)
    leader.settle()
    kinds = {type(operation).__name__ for operation in operations}
    assert kinds == {"UpdateSlots", "Run", "SetAdapter", "CompilePooling", "ActivatePooling"}
    assert any(isinstance(each, Run) and each.masks is not None for each in operations)
    assert {each.name for each in operations if isinstance(each, UpdateSlots)} == {
        "admit",
        "set_history",
    }
    for operation in operations:
        replay(follower, operation)
    follower.settle()
    states = [
        jax.tree.leaves((r.state.leaves, r.state.kv, r.state.slots)) for r in (leader, follower)
    ]
    assert len(states[0]) == len(states[1])
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.slow
def test_missing_operation_changes_the_device_state(runners):
    llm, operations, follower, _ = runners
    llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, seed=1), progress=False)
    leader = runner_of(llm)
    leader.settle()
    steps = [index for index, each in enumerate(operations) if isinstance(each, Run)]
    for operation in operations[: steps[1]] + operations[steps[1] + 1 :]:
        replay(follower, operation)
    follower.settle()
    states = [jax.tree.leaves(r.state.slots) for r in (leader, follower)]
    assert any(not np.array_equal(a, b) for a, b in zip(*states, strict=True))
