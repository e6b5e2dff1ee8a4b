"""Where a run was made, as far as its numbers depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from torchledger.journal.statements import RunStatement, is_accelerator


@dataclass(frozen=True, slots=True)
class Machine:
    """The main device of a run, its name, the version of torch, and the accelerator's name on record, if it has one."""

    device: str
    name: str
    torch: str
    simulated: bool
    accelerator: str = ""

    @property
    def kind(self) -> str:
        """The device without its number.

        >>> Machine("cuda:0", "NVIDIA H100", "2.13.0", simulated=False).kind
        'cuda'
        """
        return self.device.partition(":")[0]

    @property
    def torch_minor(self) -> str:
        """The version of torch without its patch and build.

        >>> Machine("cpu", "x86_64", "2.13.0+cpu", simulated=False).torch_minor
        '2.13'
        """
        return ".".join(self.torch.partition("+")[0].split(".")[:2])

    @property
    def is_exact(self) -> bool:
        """Whether the same program has the same numbers each time: on CPU, ``meta`` and simulated devices."""
        return self.simulated or not is_accelerator(self.device)

    @property
    def group(self) -> str:
        """The kind of device and the minor version of torch, as baselines name them.

        >>> Machine("cuda:0", "NVIDIA H100", "2.13.0", simulated=True, accelerator="h100-sxm").group
        'simulated h100-sxm, torch 2.13'
        """
        kind = (self.accelerator or self.name or self.kind) if is_accelerator(self.device) else self.kind
        return f"{'simulated ' if self.simulated else ''}{kind}, torch {self.torch_minor or 'unknown'}"


def read_machine(run: RunStatement) -> Machine:
    """The machine of a run, as far as the report says.

    >>> read_machine(RunStatement(environment={"torch": "2.13.0"}))
    Machine(device='cpu', name='', torch='2.13.0', simulated=False, accelerator='')
    """
    device, environment = run.main_device, run.environment
    devices = environment.get("devices")
    facts = devices.get(device) if isinstance(devices, dict) else None
    facts = facts if isinstance(facts, dict) else {}
    torch = environment.get("torch")
    return Machine(
        device,
        str(facts.get("name") or ""),
        torch if isinstance(torch, str) else "",
        is_accelerator(device) and bool(facts.get("simulated") or environment.get("simulated")),
        str(environment.get("accelerator") or ""),
    )
