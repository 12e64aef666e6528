#!/bin/sh
# Installs the Muster guest agent and starts it:
#
#   curl -fsS @URL@/agent/install.sh | sh
#
# The program is installed in /usr/local/bin and started by systemd, OpenRC, init or rc.local. Run the script again to
# update the agent to the version of the cluster.
set -eu

url="@URL@/agent/muster-agent"
program=/usr/local/bin/muster-agent

fail() {
    echo "muster-agent: $*" >&2
    exit 1
}

download() {
    if command -v curl >/dev/null 2>&1; then
        curl -fsS -o "$1" "$url"
    elif command -v wget >/dev/null 2>&1; then
        wget -q -O "$1" "$url"
    else
        fail "needs curl or wget"
    fi
}

with_systemd() {
    cat >/etc/systemd/system/muster-agent.service <<END
[Unit]
Description=Muster guest agent

[Service]
ExecStart=$program
Restart=always
RestartSec=2
KillMode=process
OOMPolicy=continue
TasksMax=infinity

[Install]
WantedBy=multi-user.target
END
    systemctl daemon-reload
    systemctl enable --quiet muster-agent.service
    [ -n "${MUSTER_AGENT:-}" ] || systemctl restart muster-agent.service
    echo "muster-agent: installed as a systemd service, see systemctl status muster-agent"
}

with_openrc() {
    cat >/etc/init.d/muster-agent <<END
#!/sbin/openrc-run
description="Muster guest agent"
supervisor=supervise-daemon
command=$program
respawn_delay=2
respawn_max=0
END
    chmod 755 /etc/init.d/muster-agent
    rc-update -q add muster-agent default
    [ -n "${MUSTER_AGENT:-}" ] || rc-service -q muster-agent restart
    echo "muster-agent: installed as an OpenRC service, see rc-service muster-agent status"
}

# Stops the running agent, which is then respawned. Not if the agent itself runs this script.
restart_agent() {
    [ -n "${MUSTER_AGENT:-}" ] || killall muster-agent 2>/dev/null || true
}

with_inittab() {
    if ! grep -q "$program" /etc/inittab; then
        # In the inittab of busybox there are no run levels, and the first field is a terminal.
        case $(readlink -f /sbin/init) in
            *busybox*) echo "::respawn:$program" >>/etc/inittab ;;
            *) echo "ma:2345:respawn:$program" >>/etc/inittab ;;
        esac
    fi
    kill -HUP 1
    restart_agent
    echo "muster-agent: started by init, configured in /etc/inittab"
}

with_rc_local() {
    [ -e /etc/rc.local ] || printf '#!/bin/sh\n' >/etc/rc.local
    if ! grep -q "$program" /etc/rc.local; then
        # Inserted at the top, because many of these files end with exit.
        line="(while :; do $program; sleep 2; done) >/dev/null 2>&1 </dev/null &"
        { head -n 1 /etc/rc.local; echo "$line"; tail -n +2 /etc/rc.local; } >/etc/rc.local.new
        cat /etc/rc.local.new >/etc/rc.local
        rm /etc/rc.local.new
        (while :; do $program; sleep 2; done) >/dev/null 2>&1 </dev/null &
    else
        restart_agent
    fi
    chmod 755 /etc/rc.local
    echo "muster-agent: started by /etc/rc.local"
}

# A function, so that nothing runs before the whole script is downloaded.
main() {
    [ "$(id -u)" = 0 ] || fail "must be run as root"
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "$(uname -s) on $(uname -m) is not supported"
    [ ! -e /usr/bin/muster-agent ] || fail "already installed as /usr/bin/muster-agent, by a package or by this image"
    mkdir -p /usr/local/bin
    download "$program.new" || fail "failed to download $url"
    chmod 755 "$program.new"
    version=$("$program.new" --version) || fail "failed to run the program downloaded from $url"
    mv "$program.new" "$program"
    echo "muster-agent: installed $version as $program"
    modprobe -q virtio_console 2>/dev/null || true
    if [ -d /run/systemd/system ]; then
        with_systemd
    elif command -v openrc-run >/dev/null 2>&1; then
        with_openrc
    elif [ -e /etc/inittab ]; then
        with_inittab
    else
        with_rc_local
    fi
    [ -z "${MUSTER_AGENT:-}" ] || echo "muster-agent: the running agent is replaced at its next restart"
    [ -e /dev/virtio-ports/sf-agent ] ||
        echo "muster-agent: waiting for the port sf-agent, which this instance does not have yet"
}

main
