//! Instances through the API.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use muster_test_cluster::{Host, HostCluster, qemu_processes};
use muster_testing::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::TIMEOUT;
use crate::console::Console;

/// An instance, which is not deleted on drop.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) uuid: String,
}

/// Opens the console of a VM while no daemon does.
pub(crate) fn console_without_daemon(directory: &Path) -> Console {
    let stream = UnixStream::connect(directory.join("console")).unwrap();
    Console::new(DirectConnection(stream.try_clone().unwrap()), stream)
}

/// A connection to QEMU, which accepts only one at a time.
struct DirectConnection(UnixStream);

impl Write for DirectConnection {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl Drop for DirectConnection {
    fn drop(&mut self) {
        // Also ends the thread that reads.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// Returns the request for an instance of the small guest, with changes.
pub(crate) fn request(name: &str, changes: &Value) -> Value {
    let mut body = json!({
        "name": name, "cpus": 1, "memory": 128, "disk": [{ "base": "label:tiny" }], "network": [],
    });
    let fields = changes.as_object().cloned().unwrap_or_else(Map::new);
    body.as_object_mut().unwrap().extend(fields);
    body
}

impl Instance {
    /// Requests an instance without waiting for it.
    pub(crate) fn request(host: &Host, name: &str, changes: &Value) -> Self {
        let record = host.post("/instances", Some(request(name, changes)));
        Self { uuid: record["uuid"].as_str().unwrap().to_owned() }
    }

    /// Creates an instance and waits until it runs.
    pub(crate) fn create(host: &Host, name: &str, changes: &Value) -> Self {
        let instance = Self::request(host, name, changes);
        instance.wait_for_state(host, "created");
        instance
    }

    pub(crate) fn path(&self, call: &str) -> String {
        format!("/instances/{}{call}", self.uuid)
    }

    pub(crate) fn record(&self, host: &Host) -> Value {
        host.get(&self.path(""))
    }

    pub(crate) fn wait_for_state(&self, host: &Host, state: &str) -> Value {
        wait_for(&format!("instance {} to be {state}", self.uuid), TIMEOUT, || {
            let record = self.record(host);
            assert!(state == "error" || record["state"] != "error", "{record:#}\n{}", host.log());
            (record["state"] == state).then_some(record)
        })
    }

    /// Waits for a power state and returns its event, which must be newer than `since`.
    pub(crate) fn wait_for_power(&self, host: &Host, power: &str, since: f64) -> Value {
        wait_for(&format!("instance {} to be {power}", self.uuid), TIMEOUT, || {
            (self.record(host)["power_state"] == power).then_some(())
        });
        // Events are written asynchronously.
        wait_for(&format!("an event that {} is {power}", self.uuid), TIMEOUT, || {
            let events = self.events(host, &format!("power state is now {power}"));
            events.into_iter().find(|event| event["timestamp"].as_f64().unwrap() > since)
        })
    }

    /// Sends a request that must succeed.
    pub(crate) fn post(&self, host: &Host, call: &str) -> Value {
        host.post(&self.path(call), None)
    }

    /// Returns the events with this message, newest first.
    pub(crate) fn events(&self, host: &Host, message: &str) -> Vec<Value> {
        let events = host.get(&self.path("/events?limit=1000"));
        events.as_array().unwrap().iter().filter(|event| event["message"] == message).cloned().collect()
    }

    /// Returns the console output recorded by the API.
    pub(crate) fn console_text(&self, host: &Host) -> String {
        String::from_utf8_lossy(&bytes(host, &self.path("/consoledata?length=-1"))).into_owned()
    }

    /// Connects to the console on the host of the instance.
    pub(crate) fn console(&self, host: &Host) -> Console {
        let stream = wait_for(&format!("the console of {}", self.uuid), TIMEOUT, || {
            let port = u16::try_from(self.record(host)["console_port"].as_u64()?).ok()?;
            let address = host.address.clone();
            host.namespace.run(move || TcpStream::connect((address.as_str(), port)).ok())
        });
        Console::new(stream.try_clone().unwrap(), stream)
    }

    /// Opens the console through the API of a host.
    pub(crate) fn open_console(&self, host: &Host) -> Console {
        let address = host.url().trim_start_matches("http://").to_owned();
        let request = format!(
            "GET {} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\nConnection: upgrade\r\n\
             Upgrade: muster-console\r\n\r\n",
            self.path("/console"),
            host.token()
        );
        let mut stream = host.namespace.run(move || TcpStream::connect(address.as_str()).unwrap());
        stream.write_all(request.as_bytes()).unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        assert!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
        Console::new(stream.try_clone().unwrap(), stream)
    }

    /// Deletes the instance and waits until it is deleted.
    pub(crate) fn delete(&self, host: &Host) {
        let (status, response) = host.call(Method::DELETE, &self.path(""), None);
        assert_eq!(status, 200, "{response}");
        self.wait_for_state(host, "deleted");
    }

    /// Returns the PID of its QEMU process, if it runs.
    pub(crate) fn process(&self) -> Option<i32> {
        let mut running = qemu_processes().into_iter();
        running.find(|(line, _)| line.contains(&self.uuid)).map(|(_, pid)| pid)
    }

    /// Kills its QEMU process and waits until it has exited.
    pub(crate) fn kill(&self) {
        kill(Pid::from_raw(self.process().unwrap()), Signal::SIGKILL).unwrap();
        wait_for("QEMU to exit", TIMEOUT, || self.process().is_none().then_some(()));
    }

    /// Returns the IPv4 address of one of its interfaces.
    pub(crate) fn address(&self, host: &Host, number: usize) -> String {
        self.record(host)["interfaces"][number]["ipv4"].as_str().unwrap().to_owned()
    }

    /// Returns the directory of its VM.
    pub(crate) fn vm_dir(&self, cluster: &HostCluster, host: usize) -> std::path::PathBuf {
        cluster.directory.join(format!("m{host}/data/machines/{}", self.uuid))
    }
}

/// Returns the current time in the unit of event timestamps.
pub(crate) fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Returns the body of a response.
pub(crate) fn bytes(host: &Host, path: &str) -> Vec<u8> {
    let (url, token) = (format!("{}{path}", host.url()), host.token());
    host.namespace.run(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let response = reqwest::Client::new().get(&url).bearer_auth(token).send().await.unwrap();
            assert_eq!(response.status(), 200, "{url}");
            response.bytes().await.unwrap().to_vec()
        })
    })
}
