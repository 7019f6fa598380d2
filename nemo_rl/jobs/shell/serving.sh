# The work of a server process on its node before it becomes the server: finding a port and the rest of its group.

# free_port FIRST: a port of the 5,600 from FIRST on that is free. They are below those that the kernel gives
# to outgoing connections. Tasks of one step on one node never try the same one, and jobs that start at the same time
# begin at different ones: the job's id says where, and chance only what follows. So do nodes: several may be one machine.
free_port() {
    local attempt port block="" tasks=${tasks_per_node:-1}
    if [[ -n "${SLURM_JOB_ID:-}" ]]; then
        block=$((SLURM_JOB_ID * 64 + ${SLURM_NODEID:-0}))
    fi
    for ((attempt = 0; attempt < 100; attempt++)); do
        if [[ -z "$block" ]]; then
            block=$(od -An -N4 -tu4 /dev/urandom)
        fi
        port=$(($1 + block % (5600 / tasks) * tasks + ${SLURM_LOCALID:-0} % tasks))
        block=
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            echo "$port"
            return 0
        fi
    done
    echo "no free port from $1 on" >&2
    return 1
}

# node_address: under which the other nodes of the job reach this one.
node_address() {
    local name addresses
    name=$(hostname)
    if getent hosts "$name" | grep -qv '^127\.\|^::1'; then
        echo "$name"
    else
        read -r addresses _ < <(hostname -I)
        echo "${addresses:-$name}"
    fi
}

# publish FILE WORD...: all of the words at once, for whoever reads the file.
publish() {
    local file=$1
    shift
    echo "$*" >"$file.partial"
    mv "$file.partial" "$file"
}

# await_file FILE TIMEOUT_S
await_file() {
    local deadline=$((SECONDS + $2))
    until [[ -s "$1" ]]; do
        if ((SECONDS >= deadline)); then
            echo "$1 does not exist after $2 s" >&2
            return 1
        fi
        sleep 1
    done
}

# serve: becomes the server. The first task of a group listens, and tells the others where it is.
serve() {
    set -euo pipefail
    local group=$((SLURM_PROCID / tasks_per_group)) rank=$((SLURM_PROCID % tasks_per_group))
    local meeting="$run_dir/server-$group" host port group_host group_port
    share_gpus "$tasks_per_node"
    if ((rank == 0)); then
        group_host=$(node_address)
        host=$group_host
        if [[ "$listen_host" == 127.0.0.1 ]]; then
            host=127.0.0.1
        fi
        port=$(free_port 20000)
        group_port=$(free_port 26000)
        publish "$meeting" "$host" "$port" "$group_host" "$group_port"
    else
        await_file "$meeting" "$start_timeout_s"
        read -r host port group_host group_port <"$meeting"
    fi
    server_arguments
    echo "server $group.$rank on $(hostname): port $port"
    exec "${server_command[@]}"
}

# server_arguments: adds to server_command what only the node knows; needs the variables of `serve`.
server_arguments() {
    local index
    if [[ "$parallelism" == none ]]; then
        for index in "${!server_command[@]}"; do
            server_command[index]=${server_command[index]//'{host}'/$listen_host}
            server_command[index]=${server_command[index]//'{port}'/$port}
        done
        return
    fi
    if ((rank == 0)); then
        server_command+=(--host "$listen_host" --port "$port")
    else
        server_command+=(--headless)
    fi
    if [[ "$parallelism" == pipeline ]]; then
        server_command+=(--node-rank "$rank" --master-addr "$group_host" --master-port "$group_port")
    elif ((tasks_per_group > 1)); then
        server_command+=(--data-parallel-address "$group_host" --data-parallel-rpc-port "$group_port")
        if ((rank > 0)); then
            server_command+=(--data-parallel-start-rank $((rank * replicas_per_task)))
        fi
    fi
}
