//! Keys of a real https issuer that does what it likes.

use std::path::PathBuf;
use std::time::Duration;

use muster_testing::Issuer;
use muster_testing::issuer::{Certificate, Mode, Signer};
use muster_types::ids::IssuerId;
use muster_types::issuer::IssuerState;
use muster_types::time::now;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use super::*;

const LOOPBACK: (&str, &str) = ("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8");

/// An issuer and somebody who trusts it.
struct World {
    issuer: Issuer,
    row: IssuerRow,
    bundle: PathBuf,
    _folder: TempDir,
    identities: Arc<Identities>,
}

impl World {
    fn new(pairs: &[(&str, &str)]) -> Self {
        Self::of(Issuer::start(), &[&[LOOPBACK], pairs].concat())
    }

    fn of(issuer: Issuer, pairs: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("authorities.pem");
        issuer.write_ca(&bundle);
        let mut pairs = pairs.to_vec();
        pairs.push(("FEDERATION_JWKS_CA_BUNDLE", bundle.to_str().unwrap()));
        let identities = Arc::new(Identities::new(&Settings::from_pairs(&pairs).unwrap()));
        let row = row(&issuer, &issuer.jwks_uri());
        Self { issuer, row, bundle, _folder: folder, identities }
    }

    async fn verify(&self, token: &str) -> Result<Identity, Refused> {
        self.identities.verify(&self.row, token, now()).await
    }

    fn token(&self) -> String {
        self.issuer.token(self.issuer.claims("muster"))
    }

    /// A token of a key that there is not.
    fn unknown(&self, id: &str) -> String {
        let header = json!({"alg": "RS256", "kid": id});
        self.issuer.token_with(header, self.issuer.claims("muster"), Signer::Rsa("RS256"))
    }

    async fn good(&self) {
        self.verify(&self.token()).await.unwrap();
    }

    /// Why a good token is refused.
    async fn refused(&self) -> String {
        reason(self.verify(&self.token()).await)
    }

    /// Waits until somebody has asked the issuer so often.
    async fn asked(&self, times: usize) {
        wait_for(async || self.issuer.fetches() >= times).await;
    }
}

fn row(issuer: &Issuer, jwks_uri: &str) -> IssuerRow {
    let terms =
        IssuerTerms { issuer_url: issuer.url(), jwks_uri: jwks_uri.into(), audience: "muster".into() };
    IssuerRow { id: IssuerId::new(), name: "ci".into(), state: IssuerState::Created, terms }
}

#[track_caller]
fn reason(outcome: Result<Identity, Refused>) -> String {
    match outcome {
        Err(Refused::Token(why)) => why,
        other => panic!("not refused: {other:?}"),
    }
}

async fn wait_for(is_so: impl AsyncFn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so().await {
        assert!(Instant::now() < end, "it does not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn keys_are_fetched_once_and_kept() {
    let world = World::new(&[]);
    for _ in 0..5 {
        world.good().await;
    }
    let header = json!({"alg": "ES256", "kid": "ec-1"});
    let token = world.issuer.token_with(header, world.issuer.claims("muster"), Signer::Ec("ES256"));
    world.verify(&token).await.unwrap();
    assert_eq!(world.issuer.fetches(), 1);
}

#[tokio::test]
async fn a_token_that_says_the_wrong_things_makes_nobody_ask() {
    let world = World::new(&[]);
    let claims = |name: &str, value: Value| {
        let mut claims = world.issuer.claims("muster");
        claims[name] = value;
        world.issuer.token(claims)
    };
    for token in
        [claims("aud", json!("other")), claims("iss", json!("other")), claims("exp", json!(1)), "x".into()]
    {
        reason(world.verify(&token).await);
    }
    assert_eq!(world.issuer.fetches(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_at_once_make_one_fetch() {
    let world = World::new(&[]);
    world.issuer.serve(Mode::Hang);
    let verify = |token: String| {
        let (identities, row) = (Arc::clone(&world.identities), world.row.clone());
        tokio::spawn(async move { identities.verify(&row, &token, now()).await })
    };
    let tasks: Vec<_> = (0..50).map(|_| verify(world.token())).collect();
    world.asked(1).await;
    world.issuer.serve(Mode::Keys);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(world.issuer.fetches(), 1);
}

#[tokio::test]
async fn a_fetch_goes_on_when_the_one_who_began_it_is_gone() {
    let world = World::new(&[]);
    world.issuer.serve(Mode::Hang);
    let (identities, row, token) = (Arc::clone(&world.identities), world.row.clone(), world.token());
    let first = tokio::spawn(async move { identities.verify(&row, &token, now()).await });
    world.asked(1).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    world.issuer.serve(Mode::Keys);
    world.good().await;
    assert_eq!(world.issuer.fetches(), 1);
}

#[tokio::test]
async fn changed_keys_are_found_at_once() {
    let world = World::new(&[]);
    world.good().await;
    for round in 1..=3 {
        world.issuer.rotate();
        world.good().await;
        assert_eq!(world.issuer.fetches(), 1 + round);
    }
    let old = world.token();
    world.issuer.rotate();
    world.good().await;
    assert_eq!(reason(world.verify(&old).await), "the issuer has no such key");
}

#[tokio::test]
async fn a_changed_key_is_found_even_if_tokens_do_not_name_it() {
    let world = World::new(&[]);
    let token = || {
        let header = json!({"alg": "RS256"});
        world.issuer.token_with(header, world.issuer.claims("muster"), Signer::Rsa("RS256"))
    };
    world.verify(&token()).await.unwrap();
    world.issuer.rotate();
    world.verify(&token()).await.unwrap();
    assert_eq!(world.issuer.fetches(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_unknown_keys_makes_few_fetches() {
    let world = World::new(&[]);
    world.good().await;
    let began = Instant::now();
    let flood = |round: usize| {
        let (identities, row) = (Arc::clone(&world.identities), world.row.clone());
        let tokens: Vec<_> = (0..25).map(|number| world.unknown(&format!("{round}-{number}"))).collect();
        tokio::spawn(async move {
            for token in tokens {
                reason(identities.verify(&row, &token, now()).await);
            }
        })
    };
    let tasks: Vec<_> = (0..8).map(flood).collect();
    for task in tasks {
        task.await.unwrap();
    }
    // The first one, some in a row, and one every three seconds.
    let most = 1 + 5 + began.elapsed().as_secs() as usize / 3;
    assert!(world.issuer.fetches() <= most, "{}", world.issuer.fetches());
    // Nobody else notices.
    let fetches = world.issuer.fetches();
    world.good().await;
    assert_eq!(world.issuer.fetches(), fetches);
    // A changed key is found a moment later, as the flood has ended.
    world.issuer.rotate();
    wait_for(async || world.verify(&world.token()).await.is_ok()).await;
}

#[tokio::test]
async fn kept_keys_outlive_a_failed_fetch_but_not_their_time() {
    let world = World::new(&[("FEDERATION_JWKS_CACHE_SECONDS", "3")]);
    let began = Instant::now();
    world.good().await;
    world.issuer.serve(Mode::Status(500));
    let why = reason(world.verify(&world.unknown("new")).await);
    assert_eq!(why, "its issuer's keys could not be fetched: the server answers 500");
    if began.elapsed() < Duration::from_secs(2) {
        world.good().await;
    }
    wait_for(async || world.verify(&world.token()).await.is_err()).await;
    assert_eq!(world.refused().await, "its issuer's keys could not be fetched: the server answers 500");
    world.issuer.serve(Mode::Keys);
    wait_for(async || world.verify(&world.token()).await.is_ok()).await;
}

#[tokio::test]
async fn without_a_cache_every_token_makes_a_fetch() {
    let world = World::new(&[("FEDERATION_JWKS_CACHE_SECONDS", "0")]);
    for count in 1..=3 {
        world.good().await;
        assert_eq!(world.issuer.fetches(), count);
    }
    reason(world.verify(&world.unknown("none")).await);
    assert_eq!(world.issuer.fetches(), 4);
}

#[tokio::test]
async fn an_issuer_that_hangs_costs_the_time_once() {
    let world = World::new(&[("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "1")]);
    world.issuer.serve(Mode::Hang);
    let verify = || {
        let (identities, row, token) = (Arc::clone(&world.identities), world.row.clone(), world.token());
        tokio::spawn(async move { identities.verify(&row, &token, now()).await })
    };
    let began = Instant::now();
    let tasks: Vec<_> = (0..20).map(|_| verify()).collect();
    for task in tasks {
        let why = reason(task.await.unwrap());
        assert_eq!(why, "its issuer's keys could not be fetched: not fetched within 1 seconds");
    }
    assert!(began.elapsed() < Duration::from_secs(10), "they waited one after the other");
    assert_eq!(world.issuer.fetches(), 1);
    world.issuer.serve(Mode::Keys);
    wait_for(async || world.verify(&world.token()).await.is_ok()).await;
}

#[tokio::test]
async fn answers_that_are_no_keys_are_refused() {
    let issuer = Issuer::start();
    let redirect = |target: &str| Mode::Redirect(target.into());
    for (mode, why) in [
        (Mode::Slow, "not fetched within 3 seconds"),
        (Mode::Huge, "the answer is too large"),
        (Mode::NotJson, "what it answers is not JSON"),
        (Mode::Status(500), "the server answers 500"),
        (Mode::Status(404), "the server answers 404"),
        (Mode::Status(203), "the server answers 203"),
        (redirect("http://localhost/keys"), "it is not at an https address"),
        (redirect("file:///etc/passwd"), "it is not at an https address"),
        (redirect("https://"), "the server redirects to no valid URL"),
        (redirect("/keys"), "the server redirects too often"),
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
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("ca");
        issuer.write_ca(&bundle);
        let time = ("FEDERATION_JWKS_FETCH_TIMEOUT_SECONDS", "3");
        let bundle = ("FEDERATION_JWKS_CA_BUNDLE", bundle.to_str().unwrap());
        let identities = Identities::new(&Settings::from_pairs(&[LOOPBACK, time, bundle]).unwrap());
        let token = issuer.token(issuer.claims("muster"));
        let found = reason(identities.verify(&row(&issuer, &issuer.jwks_uri()), &token, now()).await);
        assert_eq!(found, format!("its issuer's keys could not be fetched: {why}"));
    }
}

#[tokio::test]
async fn a_redirect_to_https_is_followed() {
    let world = World::new(&[]);
    world.issuer.serve(Mode::Redirect(world.issuer.moved_uri()));
    world.good().await;
    assert_eq!(world.issuer.fetches(), 2);
}

#[tokio::test]
async fn an_address_without_https_is_never_asked() {
    let mut world = World::new(&[]);
    world.row.terms.jwks_uri = world.issuer.jwks_uri().replace("https:", "http:");
    assert!(world.refused().await.ends_with("it is not at an https address"));
    world.row.terms.jwks_uri = "keys".into();
    assert!(world.refused().await.ends_with("jwks_uri is no URL"));
    assert_eq!(world.issuer.fetches(), 0);
}

#[tokio::test]
async fn an_address_of_the_inside_is_never_asked_unless_it_is_allowed() {
    let mut world = World::of(Issuer::start(), &[]);
    let name = world.row.terms.jwks_uri.clone();
    for (uri, host) in [(name.replace("localhost", "127.0.0.1"), "127.0.0.1"), (name, "localhost")] {
        world.row.terms.jwks_uri = uri;
        let end =
            format!("{host} is at a loopback address, which FEDERATION_JWKS_ALLOWED_NETWORKS does not allow");
        let why = world.refused().await;
        assert!(why.ends_with(&end), "{why}");
    }
    assert_eq!(world.issuer.fetches(), 0);
}

#[tokio::test]
async fn a_server_that_cannot_show_who_it_is_is_refused() {
    for (certificate, word) in
        [(Certificate::WrongHost, "elsewhere.example"), (Certificate::Expired, "expired")]
    {
        let world = World::of(Issuer::start_with(certificate), &[LOOPBACK]);
        let why = world.refused().await;
        assert!(why.contains("certificate") && why.contains(word), "{why}");
        assert_eq!(world.issuer.fetches(), 0);
    }
    let world = World::new(&[]);
    Issuer::start().write_ca(&world.bundle);
    let why = world.refused().await;
    assert!(why.contains("certificate"), "{why}");
    // Without any authorities of the operator's.
    let identities = Identities::new(&Settings::from_pairs(&[LOOPBACK]).unwrap());
    reason(identities.verify(&world.row, &world.token(), now()).await);
    assert_eq!(world.issuer.fetches(), 0);
}

#[tokio::test]
async fn authorities_are_read_again_when_they_change() {
    let world = World::new(&[]);
    let broken = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
    let cut = world.issuer.ca_pem().replace("-----END CERTIFICATE-----", "");
    let half_good = world.issuer.ca_pem() + broken;
    for round in 0..2 {
        for text in ["", "no certificates", broken, &cut, &half_good, "\u{0}"] {
            std::fs::write(&world.bundle, text).unwrap();
            for _ in 0..2 {
                let refused = world.verify(&world.token()).await.unwrap_err();
                assert!(matches!(refused, Refused::Authorities(_)), "{text}: {refused:?}");
            }
        }
        std::fs::remove_file(&world.bundle).unwrap();
        assert!(matches!(world.verify(&world.token()).await, Err(Refused::Authorities(_))));
        std::fs::create_dir(&world.bundle).unwrap();
        assert!(matches!(world.verify("no token").await, Err(Refused::Authorities(_))));
        std::fs::remove_dir(&world.bundle).unwrap();
        // Repaired; in the second round there are keys in the cache, which changes nothing.
        world.issuer.write_ca(&world.bundle);
        world.good().await;
        assert_eq!(world.issuer.fetches(), round + 1);
    }
    // Others than those under which the keys were fetched.
    Issuer::start().write_ca(&world.bundle);
    assert!(world.refused().await.contains("certificate"));
    // Several of them, and at once.
    std::fs::write(&world.bundle, Issuer::start().ca_pem() + "\n# ours\n" + &world.issuer.ca_pem()).unwrap();
    world.good().await;
    assert_eq!(world.issuer.fetches(), 3);
    // The same ones written again: nothing has changed.
    std::fs::write(&world.bundle, std::fs::read(&world.bundle).unwrap()).unwrap();
    world.good().await;
    assert_eq!(world.issuer.fetches(), 3);
}

#[tokio::test]
async fn another_place_for_the_keys_is_asked_at_once() {
    let mut world = World::new(&[]);
    world.good().await;
    world.row.terms.jwks_uri = world.issuer.moved_uri();
    world.issuer.rotate();
    world.good().await;
    assert_eq!(world.issuer.fetches(), 2);
    // A failure there says nothing of a failure here.
    world.row.terms.jwks_uri = format!("{}/nothing", world.issuer.url());
    assert!(world.refused().await.ends_with("the server answers 404"));
    world.row.terms.jwks_uri = world.issuer.jwks_uri();
    world.good().await;
}

/// A proxy that passes bytes on. It answers what it was asked for.
async fn proxy() -> (u16, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (tell, asked) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            let target = head.split_whitespace().nth(1).unwrap().to_owned();
            let mut far = tokio::net::TcpStream::connect(&target).await.unwrap();
            tell.send(head).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut stream, &mut far).await });
        }
    });
    (port, asked)
}

#[tokio::test]
async fn the_proxy_is_used_and_opens_no_way_inside() {
    let (port, mut asked) = proxy().await;
    let address = format!("http://localhost:{port}");
    let world = World::new(&[("HTTP_PROXY_SERVER", &address)]);
    world.good().await;
    assert!(asked.recv().await.unwrap().starts_with("CONNECT localhost:"));
    let world = World::of(Issuer::start(), &[("HTTP_PROXY_SERVER", &address)]);
    assert!(world.refused().await.contains("is at a loopback address"));
    assert!(asked.try_recv().is_err());
}
