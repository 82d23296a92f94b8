#!/bin/sh
# Seconds from the end of `pip install` to the first curves.png, in an empty environment, by the README's
# commands in their order: `sh experiments/first_curve.sh dist/*.whl`.
set -eu
WHEEL=$(realpath "$1")
README=$(realpath "$(dirname "$0")/../README.md")
PLACE=$(mktemp -d)
trap 'rm -rf "$PLACE"' EXIT
"${PYTHON:-python3}" -m venv "$PLACE/env"
PATH=$PLACE/env/bin:$PATH
export XDG_CACHE_HOME="$PLACE/cache"    # no program that was compiled before
unset PYTHONPATH JAX_COMPILATION_CACHE_DIR
cd "$PLACE"
pip install --quiet "$WHEEL"
pip check
begun=$(date +%s)
sed -n 's/^\(jaxrl-po .*\)$/\1/p' "$README" > commands
while read -r command; do
    echo "\$ $command"
    (
        sh -c "$command" < /dev/null
        times > times    # not in a pipe, which would have times of its own
        echo "processor time, user and system: $(tail -n 1 times)"
    )
    curve=$(find runs -name curves.png | head -n 1)
    if [ -n "$curve" ]; then
        echo "$curve after $(($(date +%s) - begun)) s"
        exit
    fi
done < commands
echo "error: no command of the README wrote curves.png" >&2
exit 1
