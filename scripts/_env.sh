# Sourced by the scripts beside it: goes to the repository's root and makes .venv when it is not
# there or no longer current. `ensure_env runtime` can run truegraft, `ensure_env dev` tests it too.
# PYTHON names another interpreter than python3.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# What a level is made from, and where: an equal stamp means an environment that is current.
env_stamp() {
    local files=(pyproject.toml requirements/{torch,runtime}.txt)
    [[ $1 == runtime ]] || files+=(requirements/dev.txt)
    { pwd && cat "${files[@]}"; } | cksum
}

ensure_env() {
    [[ $(cat ".venv/stamp-$1" 2>/dev/null) == "$(env_stamp "$1")" ]] || make_env "$1"
}

make_env() {
    local python=${PYTHON:-python3} levels=(runtime) level files=()
    local pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq)
    [[ $1 == runtime ]] || levels+=("$1")
    echo "setting up .venv (${levels[*]}); the first time takes a minute or two" >&2
    if [[ ! -x .venv/bin/python ]]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            die "Python 3.11 or newer is needed; PYTHON=/path/to/python3.11 names another"
        "$python" -m venv .venv
    fi
    for level in "${levels[@]}"; do files+=(-r "requirements/$level.txt"); done
    "${pip[@]}" -r requirements/torch.txt -c requirements/runtime.txt
    "${pip[@]}" "${files[@]}"
    "${pip[@]}" --no-deps --no-build-isolation -e .
    for level in "${levels[@]}"; do env_stamp "$level" >".venv/stamp-$level"; done
}
