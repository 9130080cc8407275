"""The stages of a deploy, the life of a run seen from the workstation. Nothing here prints: it emits events."""
