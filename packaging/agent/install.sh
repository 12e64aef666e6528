#!/bin/sh
# Installs the agent into the guest that this runs in, and starts it:
#
#   curl -fsS @URL@/agent/install.sh | sh
#
# The program goes to /usr/local/bin, and is started by systemd, OpenRC or init, whichever runs here. Running it again
# installs the version that the cluster has now.
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
Description=Does what the host of this machine asks for

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
    echo "muster-agent: a service of systemd: systemctl status muster-agent"
}

with_openrc() {
    cat >/etc/init.d/muster-agent <<END
#!/sbin/openrc-run
description="Does what the host of this machine asks for"
supervisor=supervise-daemon
command=$program
respawn_delay=2
respawn_max=0
END
    chmod 755 /etc/init.d/muster-agent
    rc-update -q add muster-agent default
    [ -n "${MUSTER_AGENT:-}" ] || rc-service -q muster-agent restart
    echo "muster-agent: a service of OpenRC: rc-service muster-agent status"
}

# Ends an agent that init starts again.
replace() {
    [ -n "${MUSTER_AGENT:-}" ] || killall muster-agent 2>/dev/null || true
}

with_inittab() {
    if ! grep -q "$program" /etc/inittab; then
        # Busybox has no run levels, and takes the first field for a terminal.
        case $(readlink -f /sbin/init) in
            *busybox*) echo "::respawn:$program" >>/etc/inittab ;;
            *) echo "ma:2345:respawn:$program" >>/etc/inittab ;;
        esac
    fi
    kill -HUP 1
    replace
    echo "muster-agent: started by init, by its line in /etc/inittab"
}

with_rc_local() {
    [ -e /etc/rc.local ] || printf '#!/bin/sh\n' >/etc/rc.local
    if ! grep -q "$program" /etc/rc.local; then
        # Before an exit, which many of these files end with.
        line="(while :; do $program; sleep 2; done) >/dev/null 2>&1 </dev/null &"
        { head -n 1 /etc/rc.local; echo "$line"; tail -n +2 /etc/rc.local; } >/etc/rc.local.new
        cat /etc/rc.local.new >/etc/rc.local
        rm /etc/rc.local.new
        (while :; do $program; sleep 2; done) >/dev/null 2>&1 </dev/null &
    else
        replace
    fi
    chmod 755 /etc/rc.local
    echo "muster-agent: started by its line in /etc/rc.local"
}

# Nothing is done before all of this text has arrived.
main() {
    [ "$(id -u)" = 0 ] || fail "must be installed by root"
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "there is none for $(uname -s) on $(uname -m)"
    [ ! -e /usr/bin/muster-agent ] || fail "there is one already, /usr/bin/muster-agent, of a package or of this image"
    mkdir -p /usr/local/bin
    download "$program.new" || fail "$url cannot be downloaded"
    chmod 755 "$program.new"
    version=$("$program.new" --version) || fail "what $url gives does not run here"
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
    [ -z "${MUSTER_AGENT:-}" ] || echo "muster-agent: the agent that runs this goes on until it is started again"
    [ -e /dev/virtio-ports/sf-agent ] ||
        echo "muster-agent: waits for the port sf-agent, which this machine does not have yet"
}

main
