#!/usr/bin/env bash
# All that a machine with a GPU is wanted for, in one go: build the core, `pytest -m gpu`, the doctor, the benchmark.
#
#   tests/gpu/lent.sh FOLDER [STEP...]   logs and results go to FOLDER, eight files; each step has its own limit, eleven
#                                        minutes in all, and none stops the others. STEPS: tests doctor bench mps (all)
#
# Nothing is fetched: it takes the `python3` that has PyTorch for CUDA (another: PYTHON=), and what is missing there
# from wheels in .whl, if that folder exists (pip download, beforehand: pyzmq expecttest click rich). A core that was
# built elsewhere for the same processor is used where there is no compiler.
set -u
out=$(mkdir -p "${1:?usage: tests/gpu/lent.sh FOLDER [STEP...]}" && cd "$1" && pwd)
shift
steps=" ${*:-tests doctor bench mps} "
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}"
summary=$out/summary.txt
rm -f "$out"/{setup,tests,doctor,bench,mps}.log
: > "$summary"

step() { # step LOG NAME SECONDS COMMAND...
    local log=$out/$1.log name=$2 limit=$3 begin=$SECONDS code
    shift 3
    echo "== $name: $*" >> "$log"
    timeout --kill-after=5 "$limit" "$@" >> "$log" 2>&1
    code=$?
    echo "$name: exit code $code after $((SECONDS - begin)) s: $(grep -v '^$' "$log" | tail -n 1)" | tee -a "$summary"
    return $code
}

wanted() { [[ $steps == *" $1 "* ]]; }

if compgen -G '.whl/*.whl' > /dev/null; then
    step setup install 40 "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" .whl/*.whl
fi
step setup machine 30 bash -c 'nvidia-smi; nproc; "$0" -c "
import sys, torch
print(sys.version, torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0), torch.cuda.nccl.version())"' "$python"
if ! step setup core 15 "$python" -c 'import phalanx._core'; then
    step setup build 60 "$python" setup.py -q build_ext --inplace && step setup core 15 "$python" -c 'import phalanx._core'
fi
# The backend is found through an entry point, which only an installed package has.
if ! "$python" -c 'import importlib.metadata as m; m.version("phalanx")' 2> /dev/null; then
    version=$("$python" -c 'import phalanx; print(phalanx.__version__)')
    info=$site/phalanx-$version.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: phalanx\nVersion: %s\n' "$version" > "$info/METADATA"
    printf '[torch.backends]\nphalanx = phalanx._autoload:register\n' > "$info/entry_points.txt"
fi
# Warnings are no errors here: another PyTorch than the one that the tests are kept clean with has others.
pytest=("$python" -m pytest -q -p no:cacheprovider -W default -m gpu)
"$python" -c 'import xdist' 2> /dev/null && pytest+=(-n 9)
if wanted tests; then
    step tests tests 220 "${pytest[@]}" -rfEs --timeout 100 tests/gpu tests/backend/test_cuda.py
fi
if wanted doctor; then
    step doctor doctor 45 "$python" -m phalanx doctor
    step doctor exchange 45 "$python" -m phalanx bench collectives --device cuda --world-size 2
fi
if wanted bench; then
    step bench bench 180 "$python" benchmarks/gpu/run.py --rounds 5 --steps 8 --output "$out/benchmark.json"
    tail -n 60 "$out/bench.log"
fi
# Ranks that share a GPU, with NVIDIA's server between them, which lets the GPU run their kernels beside each other.
if wanted mps && command -v nvidia-cuda-mps-control > /dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$site/mps CUDA_MPS_LOG_DIRECTORY=$site/mps-logs
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if step mps server 10 nvidia-cuda-mps-control -d; then
        step mps bench 60 "$python" benchmarks/gpu/run.py --parts "2 ranks" --rounds 5 --steps 8 --output "$out/mps.json"
        step mps quit 10 bash -c 'echo quit | nvidia-cuda-mps-control'
        tail -n 30 "$out/mps.log"
    fi
fi
cat "$summary"
