//! An instance, as its user sees it.

use std::net::TcpStream;

use muster_test_cluster::{Host, HostCluster, qemu_processes};
use muster_testing::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::PATIENCE;
use crate::console::Console;

/// An instance. It stays when this is dropped.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) uuid: String,
}

/// What asks for an instance of the small guest, with changes.
pub(crate) fn request(name: &str, changes: &Value) -> Value {
    let mut all = json!({
        "name": name, "cpus": 1, "memory": 128, "disk": [{ "base": "label:tiny" }], "network": [],
    });
    let fields = changes.as_object().cloned().unwrap_or_else(Map::new);
    all.as_object_mut().unwrap().extend(fields);
    all
}

impl Instance {
    /// Asks for an instance.
    pub(crate) fn ask_for(machine: &Host, name: &str, changes: &Value) -> Self {
        let record = machine.post("/instances", Some(request(name, changes)));
        Self { uuid: record["uuid"].as_str().unwrap().to_owned() }
    }

    /// Makes an instance and waits until it runs.
    pub(crate) fn create(machine: &Host, name: &str, changes: &Value) -> Self {
        let instance = Self::ask_for(machine, name, changes);
        instance.wait_for_state(machine, "created");
        instance
    }

    pub(crate) fn path(&self, call: &str) -> String {
        format!("/instances/{}{call}", self.uuid)
    }

    pub(crate) fn record(&self, machine: &Host) -> Value {
        machine.get(&self.path(""))
    }

    pub(crate) fn wait_for_state(&self, machine: &Host, state: &str) -> Value {
        wait_for(&format!("instance {} to be {state}", self.uuid), PATIENCE, || {
            let record = self.record(machine);
            assert!(state == "error" || record["state"] != "error", "{record:#}\n{}", machine.log());
            (record["state"] == state).then_some(record)
        })
    }

    /// Waits until its power is this, which happened after `since`, and answers the event of that.
    pub(crate) fn wait_for_power(&self, machine: &Host, power: &str, since: f64) -> Value {
        wait_for(&format!("instance {} to be {power}", self.uuid), PATIENCE, || {
            (self.record(machine)["power_state"] == power).then_some(())
        });
        // The event may come a moment later.
        wait_for(&format!("an event that {} is {power}", self.uuid), PATIENCE, || {
            let events = self.events(machine, &format!("power state is now {power}"));
            events.into_iter().find(|event| event["timestamp"].as_f64().unwrap() > since)
        })
    }

    /// Makes a call that must work.
    pub(crate) fn post(&self, machine: &Host, call: &str) -> Value {
        machine.post(&self.path(call), None)
    }

    /// Events with this message, newest first.
    pub(crate) fn events(&self, machine: &Host, message: &str) -> Vec<Value> {
        let events = machine.get(&self.path("/events?limit=1000"));
        events.as_array().unwrap().iter().filter(|event| event["message"] == message).cloned().collect()
    }

    /// What the console has shown, as the API tells it.
    pub(crate) fn shown(&self, machine: &Host) -> String {
        String::from_utf8_lossy(&bytes(machine, &self.path("/consoledata?length=-1"))).into_owned()
    }

    /// Connects to its console, which is on the machine of its node.
    pub(crate) fn console(&self, host: &Host) -> Console {
        let stream = wait_for(&format!("the console of {}", self.uuid), PATIENCE, || {
            let port = u16::try_from(self.record(host)["console_port"].as_u64()?).ok()?;
            let address = host.address.clone();
            host.namespace.run(move || TcpStream::connect((address.as_str(), port)).ok())
        });
        Console::new(stream.try_clone().unwrap(), stream)
    }

    /// Deletes it, and waits until it is gone.
    pub(crate) fn delete(&self, machine: &Host) {
        let (status, answer) = machine.call(Method::DELETE, &self.path(""), None);
        assert_eq!(status, 200, "{answer}");
        self.wait_for_state(machine, "deleted");
    }

    /// Its QEMU, if there is one.
    pub(crate) fn process(&self) -> Option<i32> {
        let mut all = qemu_processes().into_iter();
        all.find(|(line, _)| line.contains(&self.uuid)).map(|(_, number)| number)
    }

    /// Ends its QEMU without warning, and waits until it is gone.
    pub(crate) fn kill(&self) {
        kill(Pid::from_raw(self.process().unwrap()), Signal::SIGKILL).unwrap();
        wait_for("QEMU to be gone", PATIENCE, || self.process().is_none().then_some(()));
    }

    /// The address of one of its interfaces.
    pub(crate) fn address(&self, machine: &Host, number: usize) -> String {
        self.record(machine)["interfaces"][number]["ipv4"].as_str().unwrap().to_owned()
    }

    /// The folder that its node keeps it in.
    pub(crate) fn folder(&self, world: &HostCluster, machine: usize) -> std::path::PathBuf {
        world.directory.join(format!("m{machine}/data/machines/{}", self.uuid))
    }
}

/// The time, as events tell it.
pub(crate) fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
}

/// The bytes that a call answers.
pub(crate) fn bytes(machine: &Host, path: &str) -> Vec<u8> {
    let (url, token) = (format!("{}{path}", machine.url()), machine.token());
    machine.namespace.run(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let answer = reqwest::Client::new().get(&url).bearer_auth(token).send().await.unwrap();
            assert_eq!(answer.status(), 200, "{url}");
            answer.bytes().await.unwrap().to_vec()
        })
    })
}
