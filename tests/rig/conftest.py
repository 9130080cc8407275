from tests.rig.plugin import rig

__all__ = ["rig"]
