"""What a fault run does, drawn from a seed: the way, the scenario, the fault and the place where it strikes."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from tests.faults.link import Direction


class Scenario(enum.Enum):
    DEPLOY = "deploy, followed to its end"
    FOLLOW = "tail-logs -f of a run that lives"
    STOP = "stop of a run that lives"
    COLLECT = "collect of a run that has ended"


class Fault(enum.Enum):
    CUT = "the link is cut"
    STALL = "the link swallows everything"
    DELAY = "the link becomes slow"
    AGENT = "the agent is killed"
    SUPERVISOR = "the supervisor is killed"
    PUMP = "the pump of the log is killed"
    JOB = "the trainer is killed"
    CLIENT = "the client is killed"
    CONTAINER = "the container is stopped"
    SSHD = "sshd's sessions are killed and it starts anew"
    FULL = "the host's disk is full"
    CLOCK = "the host's clock jumps"


LINK = (Fault.CUT, Fault.STALL, Fault.DELAY)
KILLED = (Fault.AGENT, Fault.SUPERVISOR, Fault.PUMP, Fault.JOB, Fault.CLIENT)
# a mount on this machine is none in the rig's node, so a full disk is met locally and in the container
FAULTS = {
    "local": (*KILLED, Fault.CLOCK, Fault.FULL),
    "ssh": (*LINK, *KILLED, Fault.CLOCK, Fault.SSHD),
    "pct-stream": (*LINK, *KILLED, Fault.CLOCK, Fault.FULL, Fault.SSHD, Fault.CONTAINER),
    "pct-push": (*LINK, *KILLED, Fault.CLOCK, Fault.FULL, Fault.SSHD, Fault.CONTAINER),
}

TYPED = "typed"
# events of the command after which a fault may strike
AT_HOST = ("connected", "staged", "asking", "verdict")
RUNNING = ("launched", "log", "progress")
# files of the work directory at whose sight a fault may strike, as `glob` takes them
FILE = "file "
STAGING = (f"{FILE}releases/*.tgz.*", f"{FILE}releases/*[0-9a-f].part")
_DIGEST = "[0-9a-f]" * 64
STAGED = f"{FILE}releases/{_DIGEST}"
BEGINNING = (f"{FILE}lock/owner.json", f"{FILE}scratch/*/out", f"{FILE}runs/*/run.json")
WRITING = (f"{FILE}runs/*/out/checkpoints/*.part", f"{FILE}runs/*/out/checkpoints/*")
PLACES: dict[Scenario, tuple[str, ...]] = {
    Scenario.DEPLOY: (TYPED, *AT_HOST, "canary", *RUNNING, "ended", *STAGING, STAGED, *BEGINNING, *WRITING),
    Scenario.FOLLOW: (TYPED, "log"),
    Scenario.STOP: (TYPED, "phase"),
    Scenario.COLLECT: (TYPED,),
}
# where there is one to kill
SUPERVISED = ("launched", "log", "progress", TYPED, "phase", *WRITING)
AT_WORK = ("canary", *SUPERVISED)
# only a host that is new has this to do
NEW_ONLY = ("canary", *STAGING, STAGED)
HELD_UP = ("asking", "canary", "launched", "log", "progress")
"""Events after which it is quiet for a while: a fault may wait a moment there."""
MOST_LINES = 5
MOST_PAUSE_S = {TYPED: 1.0, **dict.fromkeys(HELD_UP, 0.4)}


def _most_bytes(scenario: Scenario, event: str, direction: Direction, proven: bool) -> int:
    """So many follow for certain: heartbeats at least, or a handshake, the agent, the files of a run."""
    if event == TYPED and scenario is Scenario.COLLECT and direction is Direction.DOWN:
        return 25_000
    if event == TYPED and not proven and direction is Direction.UP:
        return 60_000
    if event == TYPED:
        return 4_000
    return 30 if event == "phase" else 300


@dataclass(frozen=True)
class Place:
    """After the `nth` event of that name, or when a file is there: `bytes` more in `direction` (for the link) or
    `pause_s` later."""

    event: str
    nth: int
    bytes: int
    direction: Direction
    pause_s: float

    def __str__(self) -> str:
        if self.event.startswith(FILE):
            return f"when {self.event.removeprefix(FILE).replace(_DIGEST, 'DIGEST')} is there"
        return "once typed" if self.event == TYPED else f"after {self.event} #{self.nth}"


@dataclass(frozen=True)
class Case:
    seed: str
    way: str
    scenario: Scenario
    fault: Fault
    place: Place
    proven: bool
    """Whether the host knows release and verdict already."""
    jump_s: float
    """Of the clock."""

    def __str__(self) -> str:
        place = self.place
        later = f"{place.bytes} bytes from {place.direction.value}" if self.fault in LINK else f"{place.pause_s:g} s"
        known = "" if self.proven else "; the host is new"
        return f"{self.way}: {self.scenario.value}; {self.fault.value} {place} and {later}{known}"


def draw(seed: str) -> Case:
    """The same seed draws the same case: `7:ssh:CUT:STOP` (a number, way, fault and scenario) draws the place."""
    chance = random.Random(f"fault run {seed}")
    _, way, *names = seed.partition("/")[0].split(":")
    fault, scenario = Fault[names[0]], Scenario[names[1]]
    event = chance.choice(_places(scenario, fault))
    proven = scenario is not Scenario.DEPLOY or (event not in NEW_ONLY and chance.random() < 0.5)
    direction = chance.choice(list(Direction)) if event != "phase" else Direction.DOWN
    place = Place(
        event,
        nth=chance.randint(1, MOST_LINES) if event in ("log", "progress") else 1,
        bytes=chance.randint(0, _most_bytes(scenario, event, direction, proven)),
        direction=direction,
        pause_s=0.0 if fault in LINK else round(chance.uniform(0, MOST_PAUSE_S.get(event, 0.0)), 2),
    )
    return Case(seed, way, scenario, fault, place, proven, chance.choice((-86400.0, -7.0, 7.0, 86400.0)))


def dealt(number: int) -> str:
    """The seed of that number in a long row of runs: way, fault and scenario go round, the rest is drawn.

    48 neighbours meet each fault on each way. Every second is a deploy, which has the most places; the others go round.
    """
    ways = tuple(FAULTS)
    turn, at = divmod(number, len(ways))
    way = ways[at]
    round_, index = divmod(turn, len(FAULTS[way]))
    fault = FAULTS[way][index]
    first, *others = scenarios_of(fault)
    half, other = divmod(round_ + index + at, 2)
    scenario = others[half % len(others)] if other else first
    return f"{number}:{way}:{fault.name}:{scenario.name}"


def scenarios_of(fault: Fault) -> list[Scenario]:
    """Those in which it can strike, the deploy first."""
    return [scenario for scenario in Scenario if _places(scenario, fault)]


def _places(scenario: Scenario, fault: Fault) -> list[str]:
    places = list(PLACES[scenario])
    if fault in LINK:
        return [one for one in places if not one.startswith(FILE)]
    if fault in (Fault.SUPERVISOR, Fault.PUMP, Fault.JOB):
        if scenario is Scenario.COLLECT:
            return []
        there = AT_WORK if fault is Fault.JOB else SUPERVISED
        # a deploy that has just been typed has none of them
        return [one for one in places if one in there and (scenario, one) != (Scenario.DEPLOY, TYPED)]
    return places
