//! Fetches keys from an HTTPS issuer that misbehaves in many ways.

use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_testing::Issuer;
use muster_testing::issuer::{Certificate, Mode, Signer};
use muster_types::ids::IssuerId;
use muster_types::issuer::IssuerState;
use muster_types::time::now;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use super::*;

const LOOPBACK: (&str, &str) = ("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8");

/// An issuer and a verifier that trusts it.
struct Fixture {
    issuer: Issuer,
    row: IssuerRow,
    bundle: PathBuf,
    directory: TempDir,
    verifier: Arc<IdentityVerifier>,
}

impl Fixture {
    fn new(pairs: &[(&str, &str)]) -> Self {
        Self::of(Issuer::start(), &[&[LOOPBACK], pairs].concat())
    }

    fn of(issuer: Issuer, pairs: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let bundle = directory.path().join("ca.pem");
        issuer.write_ca(&bundle);
        let mut pairs = pairs.to_vec();
        pairs.push(("FEDERATION_JWKS_CA_BUNDLE", bundle.to_str().unwrap()));
        let verifier = Arc::new(verifier(&pairs, directory.path()));
        let row = row(&issuer, &issuer.jwks_uri());
        Self { issuer, row, bundle, directory, verifier }
    }

    async fn verify(&self, token: &str) -> Result<Identity, IdentityError> {
        self.verifier.verify(&self.row, token, now()).await
    }

    fn token(&self) -> String {
        self.issuer.token(self.issuer.claims("muster"))
    }

    /// Returns a token of a key that the issuer does not have.
    fn token_of_unknown_key(&self, id: &str) -> String {
        let header = json!({"alg": "RS256", "kid": id});
        self.issuer.token_with(header, self.issuer.claims("muster"), Signer::Rsa("RS256"))
    }

    async fn expect_valid(&self) {
        self.verify(&self.token()).await.unwrap();
    }

    /// Returns why a valid token is rejected.
    async fn rejection(&self) -> String {
        reason(self.verify(&self.token()).await)
    }

    /// Waits until the issuer has received this many requests.
    async fn wait_for_fetches(&self, times: usize) {
        wait_for(async || self.issuer.fetches() >= times).await;
    }
}

/// Creates a verifier that spools its events in a directory.
fn verifier(pairs: &[(&str, &str)], directory: &Path) -> IdentityVerifier {
    let settings = Settings::from_pairs(pairs).unwrap();
    let events = crate::events::Events::open(&directory.join("spool"), "node", &settings).unwrap();
    IdentityVerifier::new(&settings, &events)
}

fn row(issuer: &Issuer, jwks_uri: &str) -> IssuerRow {
    let terms =
        IssuerTerms { issuer_url: issuer.url(), jwks_uri: jwks_uri.into(), audience: "muster".into() };
    IssuerRow { id: IssuerId::new(), name: "ci".into(), state: IssuerState::Created, terms }
}

#[track_caller]
fn reason(outcome: Result<Identity, IdentityError>) -> String {
    match outcome {
        Err(IdentityError::Token(why)) => why,
        other => panic!("not rejected: {other:?}"),
    }
}

async fn wait_for(condition: impl AsyncFn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !condition().await {
        assert!(Instant::now() < end, "timed out");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn fetches_keys_once_and_caches_them() {
    let fixture = Fixture::new(&[]);
    for _ in 0..5 {
        fixture.expect_valid().await;
    }
    let header = json!({"alg": "ES256", "kid": "ec-1"});
    let token = fixture.issuer.token_with(header, fixture.issuer.claims("muster"), Signer::Ec("ES256"));
    fixture.verify(&token).await.unwrap();
    assert_eq!(fixture.issuer.fetches(), 1);
}

#[tokio::test]
async fn rejects_invalid_claims_without_fetching_keys() {
    let fixture = Fixture::new(&[]);
    let claims = |name: &str, value: Value| {
        let mut claims = fixture.issuer.claims("muster");
        claims[name] = value;
        fixture.issuer.token(claims)
    };
    for token in
        [claims("aud", json!("other")), claims("iss", json!("other")), claims("exp", json!(1)), "x".into()]
    {
        reason(fixture.verify(&token).await);
    }
    assert_eq!(fixture.issuer.fetches(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_verifications_share_one_fetch() {
    let fixture = Fixture::new(&[]);
    fixture.issuer.serve(Mode::Hang);
    let verify = |token: String| {
        let (verifier, row) = (Arc::clone(&fixture.verifier), fixture.row.clone());
        tokio::spawn(async move { verifier.verify(&row, &token, now()).await })
    };
    let tasks: Vec<_> = (0..50).map(|_| verify(fixture.token())).collect();
    fixture.wait_for_fetches(1).await;
    fixture.issuer.serve(Mode::Keys);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(fixture.issuer.fetches(), 1);
}

#[tokio::test]
async fn fetch_continues_after_its_caller_is_cancelled() {
    let fixture = Fixture::new(&[]);
    fixture.issuer.serve(Mode::Hang);
    let (verifier, row, token) = (Arc::clone(&fixture.verifier), fixture.row.clone(), fixture.token());
    let first = tokio::spawn(async move { verifier.verify(&row, &token, now()).await });
    fixture.wait_for_fetches(1).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    fixture.issuer.serve(Mode::Keys);
    fixture.expect_valid().await;
    assert_eq!(fixture.issuer.fetches(), 1);
}

#[tokio::test]
async fn finds_rotated_keys_immediately() {
    let fixture = Fixture::new(&[]);
    fixture.expect_valid().await;
    for round in 1..=3 {
        fixture.issuer.rotate();
        fixture.expect_valid().await;
        assert_eq!(fixture.issuer.fetches(), 1 + round);
    }
    let old = fixture.token();
    fixture.issuer.rotate();
    fixture.expect_valid().await;
    assert_eq!(reason(fixture.verify(&old).await), "issuer has no such key");
}

#[tokio::test]
async fn finds_rotated_key_for_tokens_without_key_id() {
    let fixture = Fixture::new(&[]);
    let token = || {
        let header = json!({"alg": "RS256"});
        fixture.issuer.token_with(header, fixture.issuer.claims("muster"), Signer::Rsa("RS256"))
    };
    fixture.verify(&token()).await.unwrap();
    fixture.issuer.rotate();
    fixture.verify(&token()).await.unwrap();
    assert_eq!(fixture.issuer.fetches(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_limits_fetches_for_unknown_keys() {
    let fixture = Fixture::new(&[]);
    fixture.expect_valid().await;
    let began = Instant::now();
    let flood = |round: usize| {
        let (verifier, row) = (Arc::clone(&fixture.verifier), fixture.row.clone());
        let tokens: Vec<_> =
            (0..25).map(|number| fixture.token_of_unknown_key(&format!("{round}-{number}"))).collect();
        tokio::spawn(async move {
            for token in tokens {
                reason(verifier.verify(&row, &token, now()).await);
            }
        })
    };
    let tasks: Vec<_> = (0..8).map(flood).collect();
    for task in tasks {
        task.await.unwrap();
    }
    // The first fetch, the burst, and one every three seconds.
    let max = 1 + 5 + began.elapsed().as_secs() as usize / 3;
    assert!(fixture.issuer.fetches() <= max, "{}", fixture.issuer.fetches());
    // Tokens with known keys are not affected.
    let fetches = fixture.issuer.fetches();
    fixture.expect_valid().await;
    assert_eq!(fixture.issuer.fetches(), fetches);
    // A rotated key is found once the limiter allows another fetch.
    fixture.issuer.rotate();
    wait_for(async || fixture.verify(&fixture.token()).await.is_ok()).await;
}

#[tokio::test]
async fn cached_keys_survive_a_failed_fetch_but_expire() {
    let fixture = Fixture::new(&[("FEDERATION_JWKS_CACHE_SECONDS", "3")]);
    let began = Instant::now();
    fixture.expect_valid().await;
    fixture.issuer.serve(Mode::Status(500));
    let why = reason(fixture.verify(&fixture.token_of_unknown_key("new")).await);
    assert_eq!(why, "failed to fetch the issuer's keys: server responded with status 500");
    if began.elapsed() < Duration::from_secs(2) {
        fixture.expect_valid().await;
    }
    wait_for(async || fixture.verify(&fixture.token()).await.is_err()).await;
    assert_eq!(
        fixture.rejection().await,
        "failed to fetch the issuer's keys: server responded with status 500"
    );
    fixture.issuer.serve(Mode::Keys);
    wait_for(async || fixture.verify(&fixture.token()).await.is_ok()).await;
}

#[tokio::test]
async fn fetches_for_every_token_without_cache() {
    let fixture = Fixture::new(&[("FEDERATION_JWKS_CACHE_SECONDS", "0")]);
    for count in 1..=3 {
        fixture.expect_valid().await;
        assert_eq!(fixture.issuer.fetches(), count);
    }
    reason(fixture.verify(&fixture.token_of_unknown_key("none")).await);
    assert_eq!(fixture.issuer.fetches(), 4);
}

#[tokio::test]
async fn concurrent_verifications_share_one_timeout() {
    let fixture = Fixture::new(&[("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "1")]);
    fixture.issuer.serve(Mode::Hang);
    let verify = || {
        let (verifier, row, token) = (Arc::clone(&fixture.verifier), fixture.row.clone(), fixture.token());
        tokio::spawn(async move { verifier.verify(&row, &token, now()).await })
    };
    let began = Instant::now();
    let tasks: Vec<_> = (0..20).map(|_| verify()).collect();
    for task in tasks {
        let why = reason(task.await.unwrap());
        assert_eq!(why, "failed to fetch the issuer's keys: timed out after 1 seconds");
    }
    assert!(began.elapsed() < Duration::from_secs(10), "the verifications waited sequentially");
    assert_eq!(fixture.issuer.fetches(), 1);
    fixture.issuer.serve(Mode::Keys);
    wait_for(async || fixture.verify(&fixture.token()).await.is_ok()).await;
}

#[tokio::test]
async fn rejects_responses_that_are_not_key_sets() {
    let issuer = Issuer::start();
    let redirect = |target: &str| Mode::Redirect(target.into());
    for (mode, why) in [
        (Mode::Slow, "timed out after 3 seconds"),
        (Mode::Huge, "response is too large"),
        (Mode::NotJson, "key set is not valid JSON"),
        (Mode::Status(500), "server responded with status 500"),
        (Mode::Status(404), "server responded with status 404"),
        (Mode::Status(203), "server responded with status 203"),
        (redirect("http://localhost/keys"), "URL is not https"),
        (redirect("file:///etc/passwd"), "URL is not https"),
        (redirect("https://"), "server redirected to an invalid URL"),
        (redirect("/keys"), "too many redirects"),
        (
            redirect("https://10.0.0.1/keys"),
            "10.0.0.1 is at a private address, which FEDERATION_JWKS_ALLOWED_NETWORKS does not allow",
        ),
        (
            redirect("https://169.254.169.254/latest"),
            "169.254.169.254 is at a link-local address, which FEDERATION_JWKS_ALLOWED_NETWORKS does not allow",
        ),
        (
            redirect("https://[::1]/keys"),
            "[::1] is at a loopback address, which FEDERATION_JWKS_ALLOWED_NETWORKS does not allow",
        ),
    ] {
        issuer.serve(mode);
        let directory = tempfile::tempdir().unwrap();
        let bundle = directory.path().join("ca");
        issuer.write_ca(&bundle);
        let time = ("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "3");
        let bundle = ("FEDERATION_JWKS_CA_BUNDLE", bundle.to_str().unwrap());
        let verifier = verifier(&[LOOPBACK, time, bundle], directory.path());
        let token = issuer.token(issuer.claims("muster"));
        let found = reason(verifier.verify(&row(&issuer, &issuer.jwks_uri()), &token, now()).await);
        assert_eq!(found, format!("failed to fetch the issuer's keys: {why}"));
    }
}

#[tokio::test]
async fn follows_redirect_to_https() {
    let fixture = Fixture::new(&[]);
    fixture.issuer.serve(Mode::Redirect(fixture.issuer.moved_uri()));
    fixture.expect_valid().await;
    assert_eq!(fixture.issuer.fetches(), 2);
}

#[tokio::test]
async fn never_requests_url_without_https() {
    let mut fixture = Fixture::new(&[]);
    fixture.row.terms.jwks_uri = fixture.issuer.jwks_uri().replace("https:", "http:");
    assert!(fixture.rejection().await.ends_with("URL is not https"));
    fixture.row.terms.jwks_uri = "keys".into();
    assert!(fixture.rejection().await.ends_with("jwks_uri is not a valid URL"));
    assert_eq!(fixture.issuer.fetches(), 0);
}

#[tokio::test]
async fn fetches_from_private_address_but_does_not_follow_redirect_to_one() {
    let mut fixture = Fixture::of(Issuer::start(), &[("FEDERATION_JWKS_CACHE_SECONDS", "0")]);
    let name = fixture.row.terms.jwks_uri.clone();
    for uri in [name.replace("localhost", "127.0.0.1"), name] {
        fixture.row.terms.jwks_uri = uri;
        fixture.expect_valid().await;
    }
    fixture.issuer.serve(Mode::Redirect(fixture.issuer.moved_uri()));
    let why = fixture.rejection().await;
    let end = "localhost is at a loopback address, which FEDERATION_JWKS_ALLOWED_NETWORKS does not allow";
    assert!(why.ends_with(end), "{why}");
    fixture.row.terms.jwks_uri = "https://169.254.169.254/keys".into();
    let why = fixture.rejection().await;
    assert!(why.contains("is at a link-local address"), "{why}");
}

#[tokio::test]
async fn accepts_self_signed_certificate_of_the_server_itself() {
    for certificate in [Certificate::SelfSigned, Certificate::SelfSignedAuthority] {
        Fixture::of(Issuer::start_with(certificate), &[]).expect_valid().await;
    }
    let fixture = Fixture::of(Issuer::start_with(Certificate::SelfSignedAuthority), &[]);
    Issuer::start_with(Certificate::SelfSignedAuthority).write_ca(&fixture.bundle);
    assert!(fixture.rejection().await.contains("certificate"));
}

/// Returns the messages of the events that a fixture's verifier spooled.
fn spooled(fixture: &Fixture) -> Vec<Value> {
    let spools = std::fs::read_dir(fixture.directory.path().join("spool")).unwrap();
    let logs = spools.map(|spool| std::fs::read_to_string(spool.unwrap().path().join("000001.log")).unwrap());
    logs.flat_map(|log| log.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<_>>())
        .collect()
}

#[tokio::test]
async fn failed_fetches_are_events_of_the_issuer() {
    let fixture = Fixture::new(&[("FEDERATION_JWKS_CACHE_SECONDS", "0")]);
    fixture.expect_valid().await;
    fixture.expect_valid().await;
    fixture.issuer.serve(Mode::Status(500));
    fixture.rejection().await;
    let events = spooled(&fixture);
    let messages: Vec<_> = events.iter().map(|event| event["message"].as_str().unwrap()).collect();
    assert_eq!(messages, ["fetched the issuer's keys", "failed to fetch the issuer's keys"]);
    assert_eq!(events[1]["extra"]["reason"], "server responded with status 500");
    assert_eq!(events[1]["objects"][0]["i"], fixture.row.id.to_string());
}

#[tokio::test]
async fn rejects_server_with_invalid_certificate() {
    for (certificate, word) in
        [(Certificate::WrongHost, "is for another host name"), (Certificate::Expired, "has expired")]
    {
        let fixture = Fixture::of(Issuer::start_with(certificate), &[LOOPBACK]);
        let why = fixture.rejection().await;
        assert!(why.contains("certificate") && why.contains(word), "{why}");
        assert_eq!(fixture.issuer.fetches(), 0);
    }
    let fixture = Fixture::new(&[]);
    Issuer::start().write_ca(&fixture.bundle);
    let why = fixture.rejection().await;
    assert!(why.contains("certificate"), "{why}");
    // Without FEDERATION_JWKS_CA_BUNDLE.
    let verifier = verifier(&[LOOPBACK], fixture.directory.path());
    reason(verifier.verify(&fixture.row, &fixture.token(), now()).await);
    assert_eq!(fixture.issuer.fetches(), 0);
}

#[tokio::test]
async fn reloads_ca_bundle_when_it_changes() {
    let fixture = Fixture::new(&[]);
    let broken = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
    let cut = fixture.issuer.ca_pem().replace("-----END CERTIFICATE-----", "");
    let half_good = fixture.issuer.ca_pem() + broken;
    for round in 0..2 {
        for text in ["", "no certificates", broken, &cut, &half_good, "\u{0}"] {
            std::fs::write(&fixture.bundle, text).unwrap();
            for _ in 0..2 {
                let error = fixture.verify(&fixture.token()).await.unwrap_err();
                assert!(matches!(error, IdentityError::CaBundle(_)), "{text}: {error:?}");
            }
        }
        std::fs::remove_file(&fixture.bundle).unwrap();
        assert!(matches!(fixture.verify(&fixture.token()).await, Err(IdentityError::CaBundle(_))));
        std::fs::create_dir(&fixture.bundle).unwrap();
        assert!(matches!(fixture.verify("no token").await, Err(IdentityError::CaBundle(_))));
        std::fs::remove_dir(&fixture.bundle).unwrap();
        // Repaired. In the second round there are cached keys, which makes no difference.
        fixture.issuer.write_ca(&fixture.bundle);
        fixture.expect_valid().await;
        assert_eq!(fixture.issuer.fetches(), round + 1);
    }
    // Other certificates than those with which the keys were fetched.
    Issuer::start().write_ca(&fixture.bundle);
    assert!(fixture.rejection().await.contains("certificate"));
    // Several certificates in one file.
    std::fs::write(&fixture.bundle, Issuer::start().ca_pem() + "\n# ours\n" + &fixture.issuer.ca_pem())
        .unwrap();
    fixture.expect_valid().await;
    assert_eq!(fixture.issuer.fetches(), 3);
    // The same content written again.
    std::fs::write(&fixture.bundle, std::fs::read(&fixture.bundle).unwrap()).unwrap();
    fixture.expect_valid().await;
    assert_eq!(fixture.issuer.fetches(), 3);
}

#[tokio::test]
async fn changed_jwks_uri_is_fetched_immediately() {
    let mut fixture = Fixture::new(&[]);
    fixture.expect_valid().await;
    fixture.row.terms.jwks_uri = fixture.issuer.moved_uri();
    fixture.issuer.rotate();
    fixture.expect_valid().await;
    assert_eq!(fixture.issuer.fetches(), 2);
    // A failure of one URL does not affect another.
    fixture.row.terms.jwks_uri = format!("{}/nothing", fixture.issuer.url());
    assert!(fixture.rejection().await.ends_with("server responded with status 404"));
    fixture.row.terms.jwks_uri = fixture.issuer.jwks_uri();
    fixture.expect_valid().await;
}

/// Starts a proxy. Returns its port and the heads of the requests that it receives.
async fn proxy() -> (u16, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, requests) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            let target = head.split_whitespace().nth(1).unwrap().to_owned();
            let mut upstream = tokio::net::TcpStream::connect(&target).await.unwrap();
            sender.send(head).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut stream, &mut upstream).await });
        }
    });
    (port, requests)
}

#[tokio::test]
async fn uses_proxy_without_allowing_internal_addresses() {
    let (port, mut requests) = proxy().await;
    let address = format!("http://localhost:{port}");
    let fixture = Fixture::new(&[("HTTP_PROXY_SERVER", &address)]);
    fixture.expect_valid().await;
    assert!(requests.recv().await.unwrap().starts_with("CONNECT localhost:"));
    let mut fixture = Fixture::of(Issuer::start(), &[("HTTP_PROXY_SERVER", &address)]);
    fixture.row.terms.jwks_uri = "https://169.254.169.254/keys".into();
    assert!(fixture.rejection().await.contains("is at a link-local address"));
    assert!(requests.try_recv().is_err());
}
