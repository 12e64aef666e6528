//! Process namespaces, which make a power failure of one host possible.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::network_namespace::NetworkNamespace;

/// The process namespace of a host. Its processes end with it, as if the host lost power.
#[derive(Debug)]
pub struct ProcessNamespace {
    init: Child,
    namespace: File,
    /// Identifies the namespace in `/proc/PID/ns/pid`.
    link: PathBuf,
}

impl ProcessNamespace {
    /// Creates a process namespace for a host, and mounts its `/proc` there.
    ///
    /// # Panics
    /// When the kernel refuses.
    #[must_use]
    pub fn new(host: &NetworkNamespace) -> Self {
        // The thread inherits the other namespaces of the host. It must not start threads afterwards.
        let create = || {
            unshare(CloneFlags::CLONE_NEWPID).expect("a process namespace");
            // The first process of the namespace, which reaps orphans.
            let init = Command::new("sh")
                .args(["-c", "while :; do sleep 3600 & wait $!; done"])
                .stdin(Stdio::null())
                .spawn()
                .expect("a shell");
            let path = format!("/proc/{}/ns/pid", init.id());
            let (namespace, link) =
                (File::open(&path).expect("a namespace"), std::fs::read_link(&path).expect("a link"));
            let mounted = Command::new("mount").args(["-t", "proc", "proc", "/proc"]).status();
            assert!(mounted.expect("mount").success(), "failed to mount /proc");
            Self { init, namespace, link }
        };
        host.run(move || std::thread::spawn(create).join().expect("no panic"))
    }

    /// Runs a function on a thread whose new processes are in the namespaces of `host` and in this one.
    ///
    /// # Panics
    /// When it panics.
    pub fn run<T: Send + 'static>(
        &self,
        host: &NetworkNamespace,
        function: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let namespace = self.namespace.try_clone().expect("a file");
        let enter = move || {
            setns(namespace.as_fd(), CloneFlags::CLONE_NEWPID).expect("a process namespace");
            function()
        };
        host.run(move || std::thread::spawn(enter).join().expect("no panic"))
    }

    /// Sends a signal to every process of the namespace.
    pub fn signal_all(&self, signal: Signal) {
        for pid in self.processes() {
            let _ = kill(pid, signal);
        }
    }

    /// Returns the processes of the namespace. `/proc` must be that of the test.
    #[must_use]
    pub fn processes(&self) -> Vec<Pid> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let is_inside =
            |path: &Path| std::fs::read_link(path.join("ns/pid")).is_ok_and(|link| link == self.link);
        entries
            .filter(|entry| is_inside(&entry.path()))
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw))
            .collect()
    }

    /// Whether a process is in this namespace.
    #[must_use]
    pub fn contains(&self, pid: Pid) -> bool {
        std::fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|link| link == self.link)
    }
}

impl Drop for ProcessNamespace {
    /// Kills all processes of the namespace and waits until they have ended.
    fn drop(&mut self) {
        let _ = self.init.kill();
        let _ = self.init.wait();
    }
}
