# One agent that is its own server: enough to find services on one host. In production the processes talk to the agent of
# their node and this file is the operators'.
server           = true
bootstrap_expect = 1
node_name        = "mesh"
data_dir         = "/consul/data"
bind_addr        = "{{ GetPrivateInterfaces | limit 1 | attr \"address\" }}"
client_addr      = "0.0.0.0"
log_level        = "WARN"
log_json         = true

# Nothing but HTTP is used.
ports {
  dns      = -1
  grpc     = -1
  serf_wan = -1
}

disable_update_check = true
disable_remote_exec  = true
enable_script_checks = false
leave_on_terminate   = true
