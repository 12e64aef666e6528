//! Federated login of CI jobs with the command line: an identity token is exchanged for a key that expires.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_testing::{Daemon, Issuer};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{TIMEOUT, setup};

const MUSTER: &str = env!("CARGO_BIN_EXE_muster");

/// A cluster that trusts an issuer, with a rule for one branch of one repository.
struct Fixture {
    directory: TempDir,
    issuer: Issuer,
    daemon: Daemon,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let issuer = Issuer::start();
        let authority = directory.path().join("authority.pem");
        issuer.write_ca(&authority);
        let daemon = setup(directory.path())
            .set("FEDERATION_JWKS_CA_BUNDLE", authority.to_str().unwrap())
            .set("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8,::1")
            .start();
        fs::create_dir(directory.path().join("job")).unwrap();
        let fixture = Self { directory, issuer, daemon };
        let (url, keys) = (fixture.issuer.url(), fixture.issuer.jwks_uri());
        fixture.administer("namespace create ci");
        fixture.administer(&format!(
            "issuer create forge --issuer-url {url} --jwks-uri {keys} --audience cloud"
        ));
        fixture.administer(
            "rule create ci deploy --issuer forge --claim repository=acme/widgets --claim ref=refs/heads/main \
             --scope network.* --ttl 600 --prefix robot",
        );
        fixture
    }

    /// Runs a command as the administrator and returns its standard output.
    fn administer(&self, arguments: &str) -> String {
        let credentials = self.daemon.data.join("credentials.json");
        let outcome = self.run(arguments, &[("MUSTER_CREDENTIALS", credentials.to_str().unwrap())]);
        assert!(outcome.success, "{arguments}: {outcome:?}");
        outcome.stdout
    }

    /// The file with the login of the job.
    fn login_file(&self) -> PathBuf {
        self.directory.path().join("job/.config/muster/credentials.json")
    }

    /// Writes a new token for a branch to a file and returns its path.
    fn token_file(&self, branch: &str) -> String {
        let file = self.directory.path().join("token");
        fs::write(&file, self.token(branch) + "\n").unwrap();
        file.display().to_string()
    }

    fn token(&self, branch: &str) -> String {
        let mut claims = self.issuer.claims("cloud");
        claims["repository"] = "acme/widgets".into();
        claims["ref"] = format!("refs/heads/{branch}").into();
        self.issuer.token(claims)
    }

    /// Runs a command as the job.
    fn job(&self, arguments: &str, variables: &[(&str, &str)]) -> Outcome {
        let mut all = vec![("MUSTER_API_URL", self.daemon.url.as_str())];
        all.extend(variables);
        self.run(arguments, &all)
    }

    /// Runs a command with only these environment variables.
    fn run(&self, arguments: &str, variables: &[(&str, &str)]) -> Outcome {
        let mut command = Command::new(MUSTER);
        command.args(arguments.split_whitespace());
        Outcome::run(&mut command, &self.directory.path().join("job"), variables)
    }
}

#[derive(Debug)]
struct Outcome {
    success: bool,
    stdout: String,
    stderr: String,
}

impl Outcome {
    fn run(command: &mut Command, home: &Path, variables: &[(&str, &str)]) -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("HOME", home).envs(variables.iter().copied());
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { success: output.status.success(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

#[test]
fn login_with_token_file_is_limited_by_its_rule() {
    let fixture = Fixture::new();
    let token = fixture.token_file("main");
    let login = format!("login --federated --namespace ci --rule deploy --token-file {token}");
    let outcome = fixture.job(&login, &[]);
    assert!(outcome.success && outcome.stdout.is_empty(), "{outcome:?}");
    assert!(outcome.stderr.contains("as namespace ci with key robot-"), "{outcome:?}");
    assert_eq!(fs::metadata(fixture.login_file()).unwrap().permissions().mode() & 0o777, 0o600);

    // Later commands need no other settings than the stored login.
    let created = fixture.run("network create lan 10.0.0.0/24 --no-wait", &[]);
    assert!(created.success, "{created:?}");
    assert!(fixture.run("network list", &[]).stdout.contains("lan"));
    let forbidden = fixture.run("artifact list", &[]);
    assert!(!forbidden.success && forbidden.stderr.contains("not scoped"), "{forbidden:?}");

    let again = fixture.job(&login, &[]);
    assert!(!again.success && again.stderr.contains("token already used"), "{again:?}");
    assert!(fixture.run("network list", &[]).success, "the stored login is invalid");
}

#[test]
fn rejected_token_is_neither_printed_nor_stored() {
    let fixture = Fixture::new();
    let token = fixture.token_file("other");
    let login = format!("login --federated --namespace ci --rule deploy --token-file {token}");
    let outcome = fixture.job(&login, &[]);
    assert!(!outcome.success && outcome.stdout.is_empty(), "{outcome:?}");
    assert!(outcome.stderr.contains("federated exchange refused: claims do not match"), "{outcome:?}");
    assert!(!outcome.stderr.contains(fs::read_to_string(&token).unwrap().trim()), "{outcome:?}");
    assert!(!fixture.login_file().exists());
    // The owner of the rule sees the reason in its events, which are written asynchronously.
    let started = Instant::now();
    let events = loop {
        let events = fixture.administer("rule events ci deploy --type audit");
        if events.contains("federated exchange refused") {
            break events;
        }
        assert!(started.elapsed() < TIMEOUT, "{events}");
        muster_testing::wait(Duration::from_millis(50));
    };
    assert!(events.contains("claims do not match") && events.contains("ref"), "{events}");

    let no_token = fixture.job("login --federated --namespace ci --rule deploy", &[("GITLAB_CI", "true")]);
    assert!(!no_token.success && no_token.stderr.contains("MUSTER_ID_TOKEN"), "{no_token:?}");
    let no_rule = fixture.job("login --federated --namespace ci", &[]);
    assert!(!no_rule.success && no_rule.stderr.contains("--rule"), "{no_rule:?}");
}

#[test]
fn github_job_requests_token_and_evaluates_printed_login() {
    let fixture = Fixture::new();
    let (url, request_head) = token_service(json!({ "count": 1, "value": fixture.token("main") }));
    let variables = [
        ("GITHUB_ACTIONS", "true"),
        ("ACTIONS_ID_TOKEN_REQUEST_URL", url.as_str()),
        ("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "proof"),
        ("MUSTER_API_URL", fixture.daemon.url.as_str()),
        ("MUSTER_NAMESPACE", "ci"),
        ("MUSTER", MUSTER),
    ];
    let script = "eval \"$($MUSTER login --federated --rule deploy --audience cloud --print)\" && \
                  $MUSTER network create lan 10.0.0.0/24 --no-wait && $MUSTER network list";
    let home = fixture.directory.path().join("job");
    let outcome = Outcome::run(Command::new("sh").args(["-c", script]), &home, &variables);
    assert!(outcome.success && outcome.stdout.contains("lan"), "{outcome:?}");
    let head = request_head.join().unwrap();
    assert!(head.starts_with("GET /token?api-version=2.0&audience=cloud "), "{head}");
    assert!(head.contains("authorization: Bearer proof\r\n"), "{head}");
    assert!(!fixture.login_file().exists(), "a printed login was stored");
}

/// Starts a token service for one request. The thread returns the head of the request.
fn token_service(token: Value) -> (String, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/token?api-version=2.0", listener.local_addr().unwrap());
    let request_head = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            socket.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let response = token.to_string();
        write!(socket, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{response}", response.len()).unwrap();
        String::from_utf8(head).unwrap()
    });
    (url, request_head)
}
