#!/usr/bin/env bash
# Tests, sanitizers and benchmarks on a machine with a GPU, against an already built checkout. Builds nothing.
#
#   benchmarks/gpu.sh [doctor|tests|sanitize|approximate|host|ops|layer|bench|all]...
#
# Default: all; bench is host, ops and layer. Tests write cuda_suite_<gpu>.json, sanitize sanitizers_<gpu>.json and
# approximate approximate_activation_<gpu>.json, doctor doctor_<gpu>.txt, which the documentation shows.
#
# OUT             where logs and tables go (default benchmarks/results)
# PYTHONPATH      kept: further packages (deep_gemm, a peer) may stand there
# PYTHON          interpreter (default python3)
# TEST_ARGS       further arguments of pytest          SANITIZERS    default "memcheck initcheck racecheck synccheck"
# OPS_ARGS, LAYER_ARGS     further arguments of the benches
# OPS_SECONDS (120), LAYER_SECONDS (330), TOOL_SECONDS (150)      time limits
# Exits with the number of steps that failed; a failed step does not stop the next.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OUT="${OUT:-benchmarks/results}" PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"
sections=" ${*:-all} "
failed=()
mkdir -p "$OUT"

wants() {
  local name
  for name in "$@" all; do [[ "$sections" == *" $name "* ]] && return 0; done
  return 1
}

step() {  # step NAME LOG COMMAND...: appends to the log, shows its end, notes a failure
  local name="$1" log="$OUT/$2" begin=$SECONDS status
  shift 2
  echo "== $name"
  "$@" >>"$log" 2>&1
  status=$?
  tail -n "${TAIL_LINES:-15}" "$log"
  echo "== $name: exit $status after $((SECONDS - begin)) s" | tee -a "$log"
  ((status == 0)) || failed+=("$name")
}

for name in $sections; do
  case "$name" in
    doctor | tests | sanitize | approximate | host | ops | layer | bench | all) ;;
    *) echo "gpu.sh: no such section: $name" >&2; exit 64 ;;
  esac
done

if wants doctor; then
  : >"$OUT/doctor.log"
  step doctor doctor.log "$python" -m benchmarks.evidence doctor --out "$OUT"
fi

if wants tests; then
  : >"$OUT/tests.log"
  # shellcheck disable=SC2086  (arguments are meant to split)
  step tests tests.log "$python" -m pytest --device cuda -q --junitxml "$OUT/tests.xml" ${TEST_ARGS:-tests}
  step "count tests" tests.log "$python" -m benchmarks.evidence suite "$OUT/tests.xml" --out "$OUT" \
    --command "pytest --device cuda ${TEST_ARGS:-tests}"
fi

if wants sanitize; then
  logs=()
  for tool in ${SANITIZERS:-memcheck initcheck racecheck synccheck}; do
    options=()
    # PyTorch probes the driver with calls that are meant to fail; those are no findings.
    [[ "$tool" == memcheck ]] && options+=(--report-api-errors no)
    # The caching allocator would hide accesses past a tensor inside a larger block.
    : >"$OUT/$tool.log"
    logs+=("$OUT/$tool.log")
    step "sanitize $tool" "$tool.log" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      timeout "${TOOL_SECONDS:-150}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      --print-limit 20 "${options[@]}" "$python" -m benchmarks.sanitize
  done
  : >"$OUT/sanitize.log"
  step "sum up sanitizers" sanitize.log "$python" -m benchmarks.evidence sanitizers "${logs[@]}" --out "$OUT"
fi

if wants approximate; then
  : >"$OUT/approximate.log"
  step approximate approximate.log "$python" -m benchmarks.evidence approximate --out "$OUT"
fi

if wants host bench; then
  : >"$OUT/host.log"
  step host host.log timeout 120 "$python" -m benchmarks.bench host \
    --json "$OUT/host.json" --markdown "$OUT/host.md"
fi

if wants ops bench; then
  : >"$OUT/ops.log"
  # shellcheck disable=SC2086
  TAIL_LINES=70 step ops ops.log "$python" -m benchmarks.bench ops --device cuda \
    --budget-seconds "${OPS_SECONDS:-120}" --json "$OUT/ops.json" --markdown "$OUT/ops.md" ${OPS_ARGS:-}
fi

if wants layer bench; then
  : >"$OUT/layer.log"
  # shellcheck disable=SC2086
  TAIL_LINES=120 step layer layer.log "$python" -m benchmarks.bench layer --device cuda \
    --budget-seconds "${LAYER_SECONDS:-330}" --json "$OUT/layer.json" --markdown "$OUT/layer.md" \
    ${LAYER_ARGS:-}
fi

echo "gpu.sh: ${#failed[@]} failed${failed[*]:+: ${failed[*]}}"
exit "${#failed[@]}"
