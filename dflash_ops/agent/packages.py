"""The short program that lists what is installed in a Python of the host: its version, its executable, name to version.

It runs for every probe and at every gate. For folders it does what importlib.metadata does, whose import alone takes
longer than all of this; where a zip, an egg or a finder of somebody's own has packages, that is asked.
"""

LIST_PACKAGES = """
import sys
del sys.path[0]
import json, os
def told(lines):
    found = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if not colon and not line.strip():
            break
        if key in ("Name", "Version"):
            found.setdefault(key, value.strip())
    return found
def first_told(files):
    for file in files:
        try:
            with open(file, encoding="utf-8", errors="replace") as text:
                if os.fstat(text.fileno()).st_size:
                    return told(text)
        except OSError:
            continue
    return {}
def in_folders():
    for finder in sys.meta_path:
        if hasattr(finder, "find_distributions") and getattr(finder, "__name__", "") != "PathFinder":
            raise LookupError
    for place in sys.path:
        if place.lower().endswith(".egg") or os.path.isfile(place):
            raise LookupError
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in names:
            if name.lower().endswith((".dist-info", ".egg-info")):
                path = os.path.join(place, name)
                yield first_told([os.path.join(path, "METADATA"), os.path.join(path, "PKG-INFO"), path])
def anywhere():
    import importlib.metadata
    for item in importlib.metadata.distributions():
        # item.metadata parses the whole description, twice: three times as long for what stands in two lines
        text = item.read_text("METADATA") or item.read_text("PKG-INFO") or item.read_text("") or ""
        yield told(text.splitlines())
def named(distributions):
    found = {}
    for each in distributions:
        if each.get("Name") and each.get("Version"):
            found.setdefault(each["Name"].lower().replace("_", "-").replace(".", "-"), each["Version"])
    return found
try:
    packages = named(in_folders())
except LookupError:
    packages = named(anywhere())
print(json.dumps([sys.version.split()[0], sys.executable, packages]))
"""
