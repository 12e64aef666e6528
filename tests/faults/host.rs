//! A host that can lose power, freeze, and lose its links.

use std::path::{Path, PathBuf};

use muster_testing::{Daemon, DaemonSetup, NetworkNamespace, ProcessNamespace, daemon_program};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::full_disk::{FullDisk, mount_disk};

/// The port of the API on every host.
pub(crate) const API_PORT: u16 = 13000;
/// Lets a daemon see another time of day. Intervals are not changed.
const CLOCK_LIBRARY: &str = "/usr/$LIB/faketime/libfaketimeMT.so.1";

/// A host in its own network, mount and process namespaces, with its daemon.
#[derive(Debug)]
pub(crate) struct FaultHost {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) data: PathBuf,
    setup: DaemonSetup,
    number: usize,
    /// `None` while the host is off.
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    daemon: Option<Daemon>,
    processes: ProcessNamespace,
    network: NetworkNamespace,
}

impl FaultHost {
    /// Creates a host that is off, with a small disk for its data.
    pub(crate) fn new(number: usize, directory: &Path, settings: &[(&str, &str)]) -> Self {
        let (name, address) = (format!("m{number}"), format!("10.99.0.{number}"));
        let data = directory.join(&name).join("data");
        mount_disk(&data);
        let setup = DaemonSetup::new(&daemon_program(), &data).arguments(&[]).port(API_PORT);
        let setup = settings.iter().fold(setup, |setup, (name, value)| setup.set(name, value));
        let setup = setup
            .listen_on_all_addresses()
            .set("NODE_NAME", &name)
            .set("NODE_MESH_IP", &address)
            .set("NODE_MESH_NIC", "mesh0")
            .set("NODE_EGRESS_NIC", "ext0");
        Self { name, address, data, setup, number, running: None }
    }

    /// Sets a setting of the daemon.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.setup = self.setup.clone().set(name, value);
    }

    /// Adds arguments of the daemon.
    pub(crate) fn set_arguments(&mut self, arguments: &[&str]) {
        self.setup = self.setup.clone().arguments(arguments);
    }

    /// The port of the switch to which the host is connected on the mesh or outside.
    pub(crate) fn switch_port(&self, switch: &str) -> String {
        format!("{switch}{}", self.number)
    }

    /// Turns the host on: new namespaces, links to both switches, and the daemon.
    pub(crate) fn power_on(&mut self, mesh: &NetworkNamespace, outside: &NetworkNamespace) {
        assert!(self.running.is_none(), "{} is on", self.name);
        let network = NetworkNamespace::new(&self.name);
        for (switch, name, device, address) in [
            (mesh, "mesh", "mesh0", self.address.clone()),
            (outside, "outside", "ext0", format!("198.51.100.{}", self.number + 1)),
        ] {
            let port = self.switch_port(name);
            // The kernel removes the devices of the previous namespace later.
            switch.sh(&format!("ip link del {port} 2>/dev/null || true"));
            switch.connect(&port, &network, device);
            switch.sh(&format!("ip link set {port} master switch up"));
            network.sh(&format!("ip link set {device} up && ip addr add {address}/24 dev {device}"));
        }
        let processes = ProcessNamespace::new(&network);
        self.running = Some(Running { daemon: None, processes, network });
        self.start_daemon();
    }

    /// Turns the host off: every process ends at once, and the network devices are gone.
    pub(crate) fn power_off(&mut self) {
        if let Some(mut running) = self.running.take() {
            if let Some(daemon) = running.daemon.take() {
                daemon.kill();
            }
            drop(running.processes);
        }
    }

    fn running(&mut self) -> &mut Running {
        self.running.as_mut().unwrap_or_else(|| panic!("{} is off", self.name))
    }

    /// Starts the daemon and waits until it is ready.
    pub(crate) fn start_daemon(&mut self) {
        self.start(self.setup.clone());
    }

    /// Starts the daemon with a clock that is wrong by some seconds.
    pub(crate) fn start_daemon_with_clock_skew(&mut self, seconds: i32) {
        let setup = self
            .setup
            .clone()
            .variable("LD_PRELOAD", CLOCK_LIBRARY)
            .variable("FAKETIME", &format!("{seconds:+}"))
            .variable("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        self.start(setup);
    }

    fn start(&mut self, setup: DaemonSetup) {
        let running = self.running();
        running.daemon = Some(running.processes.run(&running.network, move || setup.start()));
    }

    /// Kills the daemon with SIGKILL; VMs go on.
    pub(crate) fn kill_daemon(&mut self) {
        self.running().daemon.take().unwrap().kill();
    }

    pub(crate) fn signal_daemon(&mut self, signal: Signal) {
        let pid = self.running().daemon.as_ref().unwrap().pid();
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
    }

    /// Sends a signal to every process of the host.
    pub(crate) fn signal_all(&mut self, signal: Signal) {
        self.running().processes.signal_all(signal);
    }

    /// Stops the daemon with SIGTERM.
    pub(crate) fn stop_daemon(&mut self) {
        if let Some(daemon) = self.running.as_mut().and_then(|running| running.daemon.take()) {
            daemon.stop();
        }
    }

    /// Fills the disk until the result is dropped.
    pub(crate) fn fill_disk(&self) -> FullDisk {
        FullDisk::new(&self.data)
    }

    /// The network of a host that is on.
    pub(crate) fn network(&self) -> &NetworkNamespace {
        &self.running.as_ref().unwrap().network
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.data.with_extension("log")).unwrap_or_default()
    }
}
