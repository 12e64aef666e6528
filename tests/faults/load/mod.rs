//! Callers that create, change and delete objects through random hosts, and remember what they were told.

pub(crate) mod commands;
pub(crate) mod instances;
pub(crate) mod networks;
pub(crate) mod uploads;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fastrand::Rng;
use muster_testing::wait;
use reqwest::Method;
use serde_json::Value;

use crate::client::{Api, Client, Told};
use crate::guests::Guests;
use commands::Commands;
use instances::ExpectedInstances;
use networks::ExpectedNetworks;
use uploads::ExpectedUploads;

/// The threads that create networks.
const NETWORK_CALLERS: usize = 2;
/// Daemons respond earlier even if others do not respond to them.
const SLOW_CALL: Duration = Duration::from_secs(15);

/// What the callers of a round were told.
#[derive(Debug, Default)]
pub(crate) struct Expected {
    pub(crate) networks: ExpectedNetworks,
    pub(crate) instances: ExpectedInstances,
    pub(crate) uploads: ExpectedUploads,
    pub(crate) commands: Commands,
    /// Responses that are bugs, whatever failed.
    pub(crate) server_errors: Vec<String>,
    /// Calls that took long.
    pub(crate) slow_calls: Vec<String>,
}

/// Callers on their own threads.
#[derive(Debug)]
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    networks: Vec<JoinHandle<ExpectedNetworks>>,
    instances: JoinHandle<ExpectedInstances>,
    uploads: JoinHandle<ExpectedUploads>,
    commands: JoinHandle<Commands>,
    server_errors: Arc<Mutex<Vec<String>>>,
    slow_calls: Arc<Mutex<Vec<String>>>,
}

impl Load {
    pub(crate) fn start(client: &Client, guests: &Guests, round: usize, seed: u64) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let (server_errors, slow_calls) = <(Arc<Mutex<Vec<String>>>, Arc<Mutex<Vec<String>>>)>::default();
        let mut number = 0;
        let mut caller = || {
            number += 1;
            let stop = Arc::clone(&stop);
            let (server_errors, slow_calls) = (Arc::clone(&server_errors), Arc::clone(&slow_calls));
            let random = Rng::with_seed(seed.wrapping_add(number));
            move |api| Caller {
                api,
                stop,
                server_errors,
                slow_calls,
                random,
                prefix: format!("{round}-{number}"),
                counter: 0,
            }
        };
        let networks = (0..NETWORK_CALLERS)
            .map(|_| {
                let caller = caller();
                client.spawn(move |api| networks::run(caller(api)))
            })
            .collect();
        let (instance_caller, upload_caller, command_caller) = (caller(), caller(), caller());
        let (ids, network) = (guests.ids().to_vec(), guests.network.clone());
        let instances = client.spawn(move |api| instances::run(instance_caller(api), &network));
        let uploads = client.spawn(move |api| uploads::run(upload_caller(api)));
        let commands = client.spawn(move |api| commands::run(command_caller(api), &ids));
        Self { stop, networks, instances, uploads, commands, server_errors, slow_calls }
    }

    /// Waits for the calls in progress.
    pub(crate) fn finish(self) -> Expected {
        self.stop.store(true, Ordering::Relaxed);
        let networks = self.networks.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        Expected {
            networks,
            instances: self.instances.join().unwrap(),
            uploads: self.uploads.join().unwrap(),
            commands: self.commands.join().unwrap(),
            server_errors: self.server_errors.lock().unwrap().clone(),
            slow_calls: self.slow_calls.lock().unwrap().clone(),
        }
    }
}

/// A thread that calls random hosts.
struct Caller {
    api: Api,
    stop: Arc<AtomicBool>,
    server_errors: Arc<Mutex<Vec<String>>>,
    slow_calls: Arc<Mutex<Vec<String>>>,
    random: Rng,
    prefix: String,
    counter: u64,
}

impl Caller {
    /// Begins the next step, unless the load ends.
    fn next(&mut self) -> bool {
        self.counter += 1;
        !self.stop.load(Ordering::Relaxed)
    }

    /// Returns a name that no other step has.
    fn name(&self, noun: &str) -> String {
        format!("{noun}-{}-{}", self.prefix, self.counter)
    }

    fn host(&mut self) -> usize {
        self.random.usize(..self.api.hosts())
    }

    fn call(&mut self, method: Method, path: &str, body: Option<&Value>) -> Told {
        let (host, began) = (self.host(), Instant::now());
        let call = format!("{method} {path} through m{}", host + 1);
        let told = self.api.request(host, method, path, body);
        self.note(&call, began, &told);
        told
    }

    fn send(&mut self, path: &str, bytes: Vec<u8>) -> Told {
        let (host, began) = (self.host(), Instant::now());
        let told = self.api.send(host, path, bytes);
        self.note(&format!("POST {path} through m{}", host + 1), began, &told);
        told
    }

    fn note(&self, call: &str, began: Instant, told: &Told) {
        if began.elapsed() > SLOW_CALL {
            let outcome: String = format!("{told:?}").chars().take(100).collect();
            let text = format!("{call} took {:.1?}: {outcome}", began.elapsed());
            self.slow_calls.lock().unwrap().push(text);
        }
        match told {
            Told::Done(_) => return,
            Told::Failed(reason) if reason.starts_with("500") => {
                self.server_errors.lock().unwrap().push(format!("{call}: {reason}"));
            }
            Told::Failed(_) | Told::Unknown => {}
        }
        // A host that is off rejects at once.
        wait(Duration::from_millis(100));
    }
}
