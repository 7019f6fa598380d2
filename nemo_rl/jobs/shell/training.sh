say() {
    printf '%(%H:%M:%S)T %s\n' -1 "$*" >&2
}

near_end=0
stop() { # SIGNAL: the command saves and ends
    say "received $1: the command saves and ends"
    kill -TERM "$run" 2>/dev/null || true
}
trap 'near_end=1; stop USR1' USR1
trap 'stop TERM' TERM

say "on $(hostname), start number $((${SLURM_RESTART_COUNT:-0} + 1))"
"${command[@]}" &
run=$!
while true; do
    status=0
    wait "$run" || status=$?
    kill -0 "$run" 2>/dev/null || break
done
final=0
wait "$run" || final=$? # where a signal has interrupted the wait above, and the command ended meanwhile
((final == 127)) || status=$final
say "the command ended with $status"
if ((near_end && requeue && status == 130)); then
    say "requeued: the time limit is near"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
