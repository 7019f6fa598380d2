# start_router HOST:PORT...: one address before several servers.
start_router() {
    local log="$run_dir/router.log"
    in_background "$log" "$collection_environment" "${router_step[@]}" \
        "${router_command[@]}" --address-file "$run_dir/router" "$@"
    wait_for_server "the router" "$started" "$log" "$run_dir/router" /health "$start_timeout_s"
    watched+=("the router" "$started" "$log")
}
