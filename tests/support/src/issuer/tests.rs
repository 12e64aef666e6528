#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use super::*;

fn client(issuer: &Issuer) -> reqwest::Client {
    let root = reqwest::Certificate::from_pem(issuer.ca_pem().as_bytes()).unwrap();
    reqwest::Client::builder().tls_certs_only([root]).timeout(Duration::from_secs(5)).build().unwrap()
}

#[tokio::test]
async fn its_keys_are_served_to_who_trusts_its_authority() {
    let issuer = Issuer::start();
    let answer = client(&issuer).get(issuer.jwks_uri()).send().await.unwrap();
    let served: Value = answer.json().await.unwrap();
    assert_eq!(served, issuer.jwks());
    assert_eq!((&served["keys"][0]["kid"], &served["keys"][1]["kid"]), (&json!("rsa-1"), &json!("ec-1")));
    let other = Issuer::start();
    assert!(client(&other).get(issuer.jwks_uri()).send().await.is_err());
    assert_eq!((issuer.fetches(), other.fetches()), (1, 0));
    issuer.rotate();
    assert_eq!(issuer.jwks()["keys"][1]["kid"], "ec-2");
    for certificate in [Certificate::WrongHost, Certificate::Expired] {
        let bad = Issuer::start_with(certificate);
        assert!(client(&bad).get(bad.jwks_uri()).send().await.is_err(), "{certificate:?}");
    }
}

#[tokio::test]
async fn it_misbehaves_as_it_is_told() {
    let issuer = Issuer::start();
    let client = client(&issuer);
    issuer.serve(Mode::Status(500));
    assert_eq!(client.get(issuer.jwks_uri()).send().await.unwrap().status(), 500);
    issuer.serve(Mode::Huge);
    assert!(client.get(issuer.jwks_uri()).send().await.unwrap().bytes().await.unwrap().len() > HUGE_PADDING);
    issuer.serve(Mode::Redirect(issuer.moved_uri()));
    let moved = client.get(issuer.jwks_uri()).send().await.unwrap();
    assert_eq!((moved.url().path(), moved.status().as_u16()), ("/moved", 200));
    let hasty = Duration::from_millis(200);
    issuer.serve(Mode::Slow);
    assert!(client.get(issuer.jwks_uri()).timeout(hasty).send().await.unwrap().bytes().await.is_err());
    issuer.serve(Mode::Hang);
    assert!(client.get(issuer.jwks_uri()).timeout(hasty).send().await.is_err());
    let seen = issuer.fetches();
    let patient = tokio::spawn(client.get(issuer.jwks_uri()).send());
    while issuer.fetches() == seen {
        tokio::task::yield_now().await;
    }
    issuer.serve(Mode::Keys);
    assert_eq!(patient.await.unwrap().unwrap().status(), 200);
}
