#!/bin/sh
# The Debian packages of tests/rig (a real sshd and a real container). Root on Debian or Ubuntu: installs what is
# missing, and says so first. Elsewhere: says that the rig's tests will skip.
set -eu

wanted="openssh-server lxc uidmap sudo"

say() { printf '%s\n' "rig: $*"; }

if ! command -v apt-get >/dev/null 2>&1; then
    say "not Debian or Ubuntu: tests that need $wanted skip where these are missing"
    exit 0
fi
missing=
for package in $wanted; do
    dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    say "not root: tests that need$missing skip"
    exit 0
fi
say "installing$missing (the tests start their own sshd on 127.0.0.1 and their own container)"
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; }; then
    say "that failed: the tests that need them skip (with CI=true they fail)" >&2
fi
