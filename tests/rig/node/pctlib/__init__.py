"""The parts of the rig's `pct`: what Proxmox's own does with arguments, locks, namespaces and exit statuses."""
