# The servers of an array task, from the job's side; all are served at one address when `start_servers` returns.

# start_servers: adds to `watched` what must live, and to collect_command the address.
start_servers() {
    local log="$run_dir/servers.log" servers group members=()
    in_background "$log" "$server_environment" "${server_step[@]}" bash -c "$(
        declare -p run_dir tasks_per_group tasks_per_node replicas_per_task parallelism listen_host start_timeout_s \
            server_command
        declare -f serve server_arguments free_port node_address publish await_file share_gpus
    ); serve"
    servers=$started
    for ((group = 0; group < num_groups; group++)); do
        wait_for_server "server $group" "$servers" "$log" "$run_dir/server-$group" "$health_path" "$start_timeout_s"
        members+=("$server_host:$server_port")
    done
    watched+=("the server" "$servers" "$log")
    if ((num_groups > 1)); then
        start_router "${members[@]}"
    fi
    collect_command+=("server.address=http://$server_host:$server_port/v1")
}
