# Waiting for servers and beside them. Every wait has a deadline or watches what it waits for, and says why it ended.

poll_s=${NEMO_RL_POLL_S:-2}
request_timeout_s=10
log_tail_lines=50

say() {
    printf '%(%H:%M:%S)T %s\n' -1 "$*" >&2
}

is_running() {
    kill -0 "$1" 2>/dev/null
}

# show_log NAME FILE: the last lines of a log, indented.
show_log() {
    say "the last lines of $1's log ($2):"
    tail -n "$log_tail_lines" "$2" 2>/dev/null | sed 's/^/    /' >&2 || true
}

# http_status HOST PORT PATH: the status that a GET is answered with; nothing without an answer.
http_status() {
    local status
    # shellcheck disable=SC2016  # expanded by the inner shell
    status=$(timeout "$request_timeout_s" bash -c '
        exec 3<>"/dev/tcp/$1/$2" || exit 1
        printf "GET %s HTTP/1.0\r\nHost: %s:%s\r\nConnection: close\r\n\r\n" "$3" "$1" "$2" >&3
        read -r _ status _ <&3
        echo "$status"' _ "$1" "$2" "$3" 2>/dev/null) || true
    echo "${status%$'\r'}"
}

# wait_for_server NAME PID LOG ADDRESS_FILE PATH TIMEOUT_S
# Returns when a GET of PATH is answered with 200; then server_host and server_port are read from ADDRESS_FILE, as
# "HOST PORT". Fails, with the log's tail, when the process ends before that or the time is over.
wait_for_server() {
    local name=$1 pid=$2 log=$3 address_file=$4 path=$5 timeout_s=$6
    local deadline=$((SECONDS + timeout_s)) status answer="it has not found a port yet"
    while true; do
        if ! is_running "$pid"; then
            say "$name ended before it was up"
            show_log "$name" "$log"
            return 1
        fi
        if [[ -s "$address_file" ]]; then
            read -r server_host server_port _ <"$address_file"
            status=$(http_status "$server_host" "$server_port" "$path")
            if [[ "$status" == 200 ]]; then
                say "$name is up at $server_host:$server_port"
                return 0
            fi
            answer="the last answer of $server_host:$server_port$path was ${status:-none}"
        fi
        if ((SECONDS >= deadline)); then
            say "$name is not up after $timeout_s s: $answer"
            show_log "$name" "$log"
            return 1
        fi
        sleep "$poll_s"
    done
}

# wait_beside PID [NAME PID LOG]...: waits for the first process and returns its status; fails, with the log's tail,
# when one of the others ends before it.
wait_beside() {
    local main=$1 beside
    shift
    while is_running "$main"; do
        beside=("$@")
        while ((${#beside[@]})); do
            if ! is_running "${beside[1]}" && is_running "$main"; then
                say "${beside[0]} ended while it was needed"
                show_log "${beside[0]}" "${beside[2]}"
                return 1
            fi
            beside=("${beside[@]:3}")
        done
        sleep "$poll_s"
    done
    wait "$main"
}
