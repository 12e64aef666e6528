//! Real daemons in their own processes.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::free_port;
use crate::leaks::{job_directories, processes_of, still_running, unfinished_operations};
use crate::mariadb::wait;

/// The program, environment and arguments of a daemon.
#[derive(Debug, Clone)]
pub struct DaemonSetup {
    program: PathBuf,
    data: PathBuf,
    port: u16,
    listens_on_all_addresses: bool,
    wrapper: Vec<String>,
    environment: Vec<(String, String)>,
    arguments: Vec<String>,
}

impl DaemonSetup {
    /// Creates the setup of a daemon with two simulated nodes and its data in `data`, on a free port.
    #[must_use]
    pub fn new(program: &str, data: &Path) -> Self {
        Self {
            program: program.into(),
            data: data.to_owned(),
            port: free_port(),
            listens_on_all_addresses: false,
            wrapper: vec![],
            environment: vec![
                ("MUSTER_API_DRAIN_GRACE".into(), "0".into()),
                ("MUSTER_NODE_PORT".into(), "0".into()),
                ("MUSTER_MARIADB_GATEWAY_METRICS_PORT".into(), "0".into()),
                ("MUSTER_RESOURCES_METRICS_PORT".into(), "0".into()),
                ("MUSTER_CLUSTER_METRICS_PORT".into(), "0".into()),
            ],
            arguments: vec!["--simulate".into(), "2".into()],
        }
    }

    /// Sets a setting.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.environment.push((format!("MUSTER_{name}"), value.to_owned()));
        self
    }

    /// Sets an environment variable that is not a setting.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Lets it listen on a given port.
    #[must_use]
    pub fn port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    /// Lets it listen on every address, so that other hosts reach it.
    #[must_use]
    pub fn listen_on_all_addresses(self) -> Self {
        Self { listens_on_all_addresses: true, ..self }
    }

    /// Replaces the program.
    #[must_use]
    pub fn program(self, program: &str) -> Self {
        Self { program: program.into(), ..self }
    }

    /// Starts it with a wrapper such as `setpriv`, which must exec it.
    #[must_use]
    pub fn wrapped(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|a| (*a).to_owned()).collect();
        self
    }

    /// Replaces the arguments after `--data-dir` and `--listen`.
    #[must_use]
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments.iter().map(|a| (*a).to_owned()).collect();
        self
    }

    /// Returns the command, with a clean environment.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut words = self.wrapper.iter().map(Into::into).chain([self.program.clone()]);
        let mut command = Command::new(words.next().unwrap_or_default());
        let address = if self.listens_on_all_addresses { "0.0.0.0" } else { "127.0.0.1" };
        command
            .args(words)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(self.environment.iter().cloned())
            .arg("serve")
            .arg("--data-dir")
            .arg(&self.data)
            .args(["--listen", &format!("{address}:{}", self.port)])
            .args(&self.arguments)
            .stdin(Stdio::null());
        command
    }

    /// Starts the daemon and waits until it is ready.
    ///
    /// # Panics
    /// When it does not become ready.
    #[must_use]
    pub fn start(&self) -> Daemon {
        let log = self.data.with_extension("log");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log).expect("a log file");
        let child = self
            .command()
            .stderr(file)
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("the daemon starts");
        let scheme = if self.environment.iter().any(|(name, _)| name == "MUSTER_TLS_CERTIFICATE") {
            "https"
        } else {
            "http"
        };
        let mut daemon = Daemon {
            child,
            url: format!("{scheme}://127.0.0.1:{}", self.port),
            data: self.data.clone(),
            log,
            database_url: self.database_url(),
            is_killed: AtomicBool::new(false),
            is_exit_expected: AtomicBool::new(false),
            allows_unfinished_operations: AtomicBool::new(false),
        };
        daemon.wait_ready(self.port);
        daemon
    }

    fn database_url(&self) -> String {
        let set = self.environment.iter().rfind(|(name, _)| name == "MUSTER_DATABASE_URL");
        let default = || format!("sqlite:{}", self.data.join("muster.db").display());
        set.map_or_else(default, |(_, url)| url.clone())
    }
}

/// Returns the path of the `muster` program that Cargo built for the running integration test.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn daemon_program() -> String {
    let test = std::env::current_exe().expect("a path");
    let program = test.ancestors().nth(2).expect("a target directory").join("muster");
    assert!(program.exists(), "{} does not exist", program.display());
    program.to_str().expect("UTF-8").to_owned()
}

/// The maximum time to wait for operations and processes to end before they are leaks.
const LEAK_TIMEOUT: Duration = Duration::from_secs(30);

/// A running daemon. Dropping it stops it, and fails the test when it has exited by itself, exits with an error, or leaves
/// unfinished operations, processes or job directories.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    pub url: String,
    pub data: PathBuf,
    log: PathBuf,
    database_url: String,
    is_killed: AtomicBool,
    /// Whether the test has asked it to exit, or waited for its exit.
    is_exit_expected: AtomicBool,
    allows_unfinished_operations: AtomicBool,
}

impl Daemon {
    fn wait_ready(&mut self, port: u16) {
        let started = Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                panic!("the daemon exited with {status}: {}", self.log());
            }
            // With TLS only the socket is checked, since the test chooses the certificate.
            let ready = if self.url.starts_with("https") {
                std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
            } else {
                is_ready(port)
            };
            if ready {
                return;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "the daemon is not ready: {}", self.log());
            wait(Duration::from_millis(20));
        }
    }

    /// Returns its log.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it with SIGKILL.
    pub fn kill(self) {
        self.signal(Signal::SIGKILL);
    }

    /// Sends SIGTERM and waits until it exits.
    ///
    /// # Panics
    /// When it does not stop, or leaves processes.
    pub fn stop(mut self) -> ExitStatus {
        self.terminate().unwrap_or_else(|problem| panic!("{problem}"))
    }

    /// Lets the test end with unfinished operations.
    pub fn allow_unfinished_operations(&self, _reason: &'static str) {
        self.allows_unfinished_operations.store(true, Ordering::Relaxed);
    }

    /// Waits until it exits on its own.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_for_exit(&mut self) -> ExitStatus {
        self.is_exit_expected.store(true, Ordering::Relaxed);
        let started = Instant::now();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "the daemon does not exit: {}", self.log());
            wait(Duration::from_millis(20));
        }
    }

    fn terminate(&mut self) -> Result<ExitStatus, String> {
        let processes = processes_of(self.child.id());
        self.signal(Signal::SIGTERM);
        let started = Instant::now();
        let status = loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                break status;
            }
            if started.elapsed() > Duration::from_secs(60) {
                return Err(format!("the daemon did not stop: {}", self.log()));
            }
            wait(Duration::from_millis(20));
        };
        wait_until_none("a stopped daemon leaves", || still_running(&processes))?;
        Ok(status)
    }

    /// Stops it after its operations have finished.
    fn finish(&mut self) -> Result<(), String> {
        if !self.allows_unfinished_operations.load(Ordering::Relaxed) {
            wait_until_none("a daemon ends with unfinished operations", || {
                unfinished_operations(&self.database_url)
            })?;
        }
        let status = self.terminate()?;
        if !status.success() {
            return Err(format!("the daemon stopped with {status}: {}", self.log()));
        }
        wait_until_none("a stopped daemon leaves", || job_directories(&self.data))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        if signal == Signal::SIGKILL {
            self.is_killed.store(true, Ordering::Relaxed);
        }
        if !matches!(signal, Signal::SIGSTOP | Signal::SIGCONT) {
            self.is_exit_expected.store(true, Ordering::Relaxed);
        }
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Stops the process with SIGSTOP, and returns when all its threads have stopped. On a busy host they run for a while
    /// after the signal.
    pub fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let status = task.and_then(|task| std::fs::read_to_string(task.path().join("stat")));
            // The state follows the name, which is in parentheses.
            status.is_ok_and(|status| status.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
        };
        while !std::fs::read_dir(&tasks).is_ok_and(|mut tasks| tasks.all(is_stopped)) {
            wait(Duration::from_millis(5));
        }
    }

    /// Returns the generated key of the system namespace.
    ///
    /// # Panics
    /// When the daemon did not write one.
    #[must_use]
    pub fn system_key(&self) -> String {
        let text = std::fs::read_to_string(self.data.join("credentials.json")).expect("credentials");
        let credentials: Value = serde_json::from_str(&text).expect("JSON");
        credentials["key"].as_str().expect("a key").to_owned()
    }

    /// Logs in and returns the token.
    ///
    /// # Panics
    /// When that fails.
    pub async fn log_in(&self, namespace: &str, key: &str) -> String {
        let (status, body) =
            self.call("", Method::POST, "/auth", Some(json!({ "namespace": namespace, "key": key }))).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        body["access_token"].as_str().expect("a token").to_owned()
    }

    /// Calls the API and returns status and JSON.
    ///
    /// # Panics
    /// When there is no response.
    pub async fn call(
        &self,
        token: &str,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> (StatusCode, Value) {
        self.try_call(token, method, path, body).await.expect("a response")
    }

    /// Calls the API of a daemon that may not respond.
    pub async fn try_call(
        &self,
        token: &str,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<(StatusCode, Value), reqwest::Error> {
        static CLIENT: std::sync::OnceLock<reqwest::Client> = std::sync::OnceLock::new();
        let client = CLIENT.get_or_init(|| {
            // Connections are not reused: they end with the runtime of the test that opened them.
            reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client")
        });
        let mut request = client.request(method, format!("{}{path}", self.url));
        if !token.is_empty() {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = request.send().await?;
        Ok((response.status(), response.json().await.unwrap_or(Value::Null)))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let result = match self.child.try_wait() {
            _ if std::thread::panicking() || self.is_killed.load(Ordering::Relaxed) => Ok(()),
            Ok(None) => self.finish(),
            Ok(Some(_)) if self.is_exit_expected.load(Ordering::Relaxed) => Ok(()),
            // Tests also kill all processes of a host.
            Ok(Some(status)) if status.signal() == Some(Signal::SIGKILL as i32) => Ok(()),
            Ok(Some(status)) => Err(format!("the daemon exited by itself with {status}: {}", self.log())),
            Err(error) => Err(format!("failed to query the daemon: {error}")),
        };
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Err(problem) = result {
            panic!("{problem}");
        }
    }
}

/// Polls until `list` is empty.
fn wait_until_none(what: &str, list: impl Fn() -> Vec<String>) -> Result<(), String> {
    let started = Instant::now();
    loop {
        let found = list();
        if found.is_empty() {
            return Ok(());
        }
        if started.elapsed() > LEAK_TIMEOUT {
            return Err(format!("{what}:\n{}", found.join("\n")));
        }
        wait(Duration::from_millis(20));
    }
}

fn is_ready(port: u16) -> bool {
    use std::io::{Read as _, Write as _};
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else { return false };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
    let mut answer = String::new();
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").is_ok()
        && stream.read_to_string(&mut answer).is_ok()
        && answer.starts_with("HTTP/1.1 200")
}
