#!/bin/sh
# Prints some packages' entries of a lock, with versions, markers and hashes: pick_lock.sh LOCK NAME...
set -eu
lock=$1
shift
awk -v names="$*" '
    BEGIN { for (n = split(names, wanted, " "); n > 0; n--) missing[wanted[n]] = 1 }
    /^[a-z0-9]/ { name = $1; sub(/==.*/, "", name); keep = name in missing; if (keep) found[name] = 1 }
    keep
    END {
        for (name in missing) if (!(name in found)) { print FILENAME " has no " name >"/dev/stderr"; bad = 1 }
        exit bad
    }' "$lock"
