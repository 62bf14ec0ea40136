#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How scripts in the manner of the reference suite read logs: grep for the step lines, awk and sed for the values.
# Our own words for what that suite's parser does, with its limits: 50 steps, iterations 35-44, plain decimals.
set -eu
folder=${1:-experiments}
[ -d "$folder" ] || exit 1
success=0 failed=0
row='%-90s %8s %13s %12s %19s %18s\n'
line() { printf '%*s' "$1" '' | tr ' ' '-'; }

echo 'Train Step Timing and TFLOPS Analysis (iterations 35-44)'
printf '%*s\n' 80 '' | tr ' ' '='
printf "$row" Experiment Status 'Time Mean (s)' 'Time Std (s)' 'TFLOPS_per_GPU Mean' 'TFLOPS_per_GPU Std'
printf "$row" "$(line 90)" "$(line 8)" "$(line 13)" "$(line 12)" "$(line 19)" "$(line 18)"

while IFS= read -r log; do
    file=$(basename "$log")
    case $file in *nccltrace*|*prepare_squad_dataset_exp*|*import_ckpt_exp*|*nsys_analysis*) continue ;; esac
    name=$(printf '%s\n' "$file" | sed -e 's/^[^.]*\.//' -e 's/_0\.out$//')
    if ! grep -q 'train_step_timing in s:' "$log"; then
        case $file in sbatch_*|vboost*) continue ;; esac
        if grep -q 'iteration\|training\|model\|experiment' "$log"; then
            failed=$((failed + 1))
            printf "$row" "$name" Failed - - - -
        fi
        continue
    fi
    found=$(grep 'train_step_timing in s:' "$log" | sed -n 's/.*iteration \([0-9]*\)\/49 \(.*\)/\1 \2/p' | awk '
        $1 < 35 || $1 > 44 { next }
        {
            n++
            if ($1 > last) last = $1
            match($0, /train_step_timing in s: [0-9]+\.?[0-9]*/)
            time[n] = substr($0, RSTART + 24, RLENGTH - 24) + 0
            if (match($0, /TFLOPS_per_GPU: [0-9]+\.?[0-9]*([eE][-+]?[0-9]+)?/))
                rate[++m] = substr($0, RSTART + 16, RLENGTH - 16) + 0
        }
        function mean(v, n,   i, s) { for (i = 1; i <= n; i++) s += v[i]; return s / n }
        function deviation(v, n,   i, s, a) {
            a = mean(v, n)
            for (i = 1; i <= n; i++) s += (v[i] - a) * (v[i] - a)
            return sqrt(s / n)
        }
        END {
            if (!n) exit
            if (last < 44) { print "failed", last; exit }
            printf "success %.3f %.3f ", mean(time, n), deviation(time, n)
            if (m) printf "%.2f %.2f\n", mean(rate, m), deviation(rate, m); else print "- -"
        }')
    set -- $found
    case ${1:-} in
        success) success=$((success + 1)); printf "$row" "$name" Success "$2" "$3" "$4" "$5" ;;
        failed) failed=$((failed + 1)); printf '%-90s %8s %30s\n' "$name" Failed "($2 iterations)" ;;
    esac
done <<LOGS
$(find "$folder" -name '*.out' -type f | LC_ALL=C sort)
LOGS

echo
echo 'Summary:'
echo "  Success experiments: $success"
echo "  Failed experiments: $failed"
total=$((success + failed))
[ "$total" -gt 0 ] && echo "  Success rate: $((100 * success / total))%" || echo '  Success rate: N/A'
[ "$success" -gt 0 ]
