//! Callers that create, change and delete networks and read consoles through every host, and retry calls that fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_test_cluster::HostCluster;
use muster_testing::wait;
use reqwest::Method;
use serde_json::{Value, json};

use crate::TIMEOUT;

const CALLERS: usize = 3;
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Callers on their own threads.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    callers: Vec<JoinHandle<Caller>>,
}

impl Load {
    /// Starts callers in the namespace of the first host, which reaches the others.
    pub(super) fn start(cluster: &HostCluster, instances: &[String]) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let urls: Vec<String> =
            cluster.hosts.iter().map(|host| host.url().replace("127.0.0.1", &host.address)).collect();
        let start_caller = |number: usize| {
            let (stop, urls, token) = (Arc::clone(&stop), urls.clone(), cluster.host(1).token());
            let instances = instances.to_vec();
            cluster.host(1).namespace.run(move || {
                std::thread::spawn(move || {
                    let mut caller = Caller::new(number, urls, token);
                    while !stop.load(Ordering::Relaxed) {
                        caller.use_network();
                        caller.read_consoles(&instances);
                    }
                    caller
                })
            })
        };
        let callers = (0..CALLERS).map(start_caller).collect();
        Self { stop, callers }
    }

    /// Waits for the calls in progress, and requires that each has succeeded in the end.
    pub(super) fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        let callers: Vec<Caller> = self.callers.into_iter().map(|caller| caller.join().unwrap()).collect();
        let (calls, networks): (u64, u64) = callers
            .iter()
            .fold((0, 0), |(calls, networks), caller| (calls + caller.calls, networks + caller.networks));
        let mut failures = BTreeMap::new();
        for (reason, count) in callers.iter().flat_map(|caller| &caller.failures) {
            *failures.entry(reason).or_insert(0) += count;
        }
        println!("{calls} calls, {networks} networks; repeated: {failures:#?}");
        let violations: Vec<&String> = callers.iter().flat_map(|caller| &caller.violations).collect();
        assert!(violations.is_empty(), "{violations:#?}");
        assert!(networks > 0, "no caller has created a network");
    }
}

struct Caller {
    number: usize,
    urls: Vec<String>,
    token: String,
    client: reqwest::Client,
    runtime: tokio::runtime::Runtime,
    calls: u64,
    networks: u64,
    /// The number of attempts that failed, by reason.
    failures: BTreeMap<String, u64>,
    /// Calls that no retry could repair.
    violations: Vec<String>,
}

impl Caller {
    fn new(number: usize, urls: Vec<String>, token: String) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // A new connection for each call, so that the daemon never closes one while a request is sent.
        let client = reqwest::Client::builder().timeout(TIMEOUT).pool_max_idle_per_host(0).build().unwrap();
        Self {
            number,
            urls,
            token,
            client,
            runtime,
            calls: 0,
            networks: 0,
            failures: BTreeMap::new(),
            violations: vec![],
        }
    }

    /// Creates a network, changes and reads it, and deletes it.
    fn use_network(&mut self) {
        let name = format!("load-{}-{}", self.number, self.calls);
        let path = format!("/networks/{name}");
        let body = json!({
            "name": name, "netblock": "10.77.0.0/24", "provide_dhcp": false, "provide_nat": false,
        });
        let Some(network) = self.succeed(&Method::POST, "/networks", Some(&body), &path) else { return };
        let path = format!("/networks/{}", network["uuid"].as_str().unwrap_or_default());
        let metadata = json!({ "value": self.calls });
        self.succeed(&Method::PUT, &format!("{path}/metadata/load"), Some(&metadata), &path);
        let began = Instant::now();
        while let Some(record) = self.succeed(&Method::GET, &path, None, &path) {
            match record["state"].as_str().unwrap_or_default() {
                "created" => {
                    self.networks += 1;
                    break;
                }
                "error" => self.violations.push(format!("the creation failed: {record}")),
                _ if began.elapsed() > TIMEOUT => {
                    self.violations.push(format!("the creation does not end: {record}"));
                }
                _ => {
                    wait(POLL_INTERVAL);
                    continue;
                }
            }
            return;
        }
        self.succeed(&Method::DELETE, &path, None, &path);
    }

    /// Reads the console of each instance, which only the daemon of its host can do.
    fn read_consoles(&mut self, instances: &[String]) {
        for instance in instances {
            let path = format!("/instances/{instance}/consoledata?length=100");
            self.succeed(&Method::GET, &path, None, &path);
        }
    }

    /// Makes a call through the next host, and repeats it there while the daemon is not up or answers with 503. If the outcome
    /// is unknown, an object at `object` counts as the result of a POST, and its absence as that of a DELETE.
    fn succeed(&mut self, method: &Method, path: &str, body: Option<&Value>, object: &str) -> Option<Value> {
        self.calls += 1;
        let host = usize::try_from(self.calls).unwrap() % self.urls.len();
        let (call, began) = (format!("{method} {path} through m{}", host + 1), Instant::now());
        let mut is_unknown = false;
        loop {
            let is_check = is_unknown && *method == Method::POST;
            let response = if is_check {
                self.call(host, Method::GET, object, None)
            } else {
                self.call(host, method.clone(), path, body)
            };
            let (reason, unknown) = match response {
                Ok((200 | 202, value)) => return Some(value),
                Ok((404, _)) if is_unknown && *method == Method::DELETE => return None,
                Ok((404, _)) if is_check => {
                    is_unknown = false;
                    continue;
                }
                Ok((503, value)) => {
                    let text = value["error"].as_str().unwrap_or_default();
                    (format!("503 {text}"), text.contains("it is unknown whether"))
                }
                Ok((status, value)) => {
                    self.violations.push(format!("{call}: {status} {value}"));
                    return None;
                }
                Err(_) => ("no response".to_owned(), true),
            };
            is_unknown |= unknown;
            *self.failures.entry(reason.clone()).or_default() += 1;
            if began.elapsed() > TIMEOUT {
                self.violations.push(format!("{call} does not succeed: {reason}"));
                return None;
            }
            wait(RETRY_INTERVAL);
        }
    }

    /// Calls a host. An error means that there was no response.
    fn call(
        &self,
        host: usize,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), reqwest::Error> {
        self.runtime.block_on(async {
            let url = format!("{}{path}", self.urls[host]);
            let mut request = self.client.request(method, url).bearer_auth(&self.token);
            if let Some(body) = body {
                request = request.json(body);
            }
            let response = request.send().await?;
            Ok((response.status().as_u16(), response.json().await.unwrap_or(Value::Null)))
        })
    }
}
