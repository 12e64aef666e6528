//! Serial consoles and screens.

use aws_lc_rs::signature::{ED25519, UnparsedPublicKey};
use axum::http::Method;
use muster_node::SimulationScript;
use serde_json::{Value, json};

use super::{act, create, object, path, refusal, text, try_create};
use crate::networks::{cluster, get};

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_serial_console_is_read_in_every_form_of_length() {
    let (cluster, token) = cluster(&[]).await;
    let shown = "0123456789".repeat(1200);
    for node in [&cluster.node, &cluster.other] {
        node.set_script(SimulationScript {
            console_text: Some(shown.clone()),
            ..SimulationScript::default()
        });
    }
    let record = create(&cluster, &token, "www", &json!({})).await;
    let at = path(&record, "/consoledata");
    let read = async |body: Value| cluster.call(&token, Method::GET, &at, Some(body)).await;
    let whole = get(&cluster, &token, &at).await;
    assert_eq!(whole.headers["content-type"], "application/octet-stream");
    for usual in [
        json!({}),
        json!({"length": null}),
        json!({"length": 0}),
        json!({"length": ""}),
        json!({"length": "0"}),
    ] {
        let answer = read(usual.clone()).await;
        assert_eq!((answer.status.as_u16(), answer.text.as_str()), (200, &shown[12000 - 10240..]), "{usual}");
    }
    assert_eq!(read(json!({"length": -1})).await.text, shown);
    assert_eq!(read(json!({"length": "-1"})).await.text, shown);
    assert_eq!(read(json!({"length": 4})).await.text, "6789");
    assert_eq!(read(json!({"length": "12"})).await.text, "890123456789");
    assert_eq!(read(json!({"length": 99999})).await.text, shown);
    assert_eq!(get(&cluster, &token, &format!("{at}?length=3")).await.text, "789");
    for wrong in [json!("ten"), json!(1.5), json!(true), json!([4])] {
        let answer = read(json!({"length": wrong})).await;
        assert_eq!(refusal(&answer), (400, "length is not an integer"), "{wrong}");
    }
    assert_eq!(read(json!({"length": -2})).await.status, 400);
    let absent = get(&cluster, &token, "/instances/absent/consoledata?length=ten").await;
    assert_eq!(absent.status, 400, "what makes no sense is said before anything is looked up");

    let cleared = cluster.call(&token, Method::DELETE, &at, None).await;
    assert_eq!((cleared.status.as_u16(), cleared.text.as_str()), (200, "null\n"));
    let empty = get(&cluster, &token, &at).await;
    assert_eq!((empty.status.as_u16(), empty.text.as_str()), (200, ""));
    act(&cluster, &token, &record, "reboothard").await;
    assert_eq!(read(json!({"length": -1})).await.text, shown, "it boots once more");
    assert!(
        cluster.messages(&object(&record)).await.contains(&"clear console request from REST API".to_owned())
    );

    // One that has no place shows nothing.
    try_create(&cluster, &token, "huge", &json!({"cpus": 500})).await;
    let nothing = get(&cluster, &token, "/instances/huge/consoledata").await;
    assert_eq!((nothing.status.as_u16(), nothing.text.as_str()), (200, ""));
    assert_eq!(
        cluster.call(&token, Method::DELETE, "/instances/huge/consoledata", None).await.text,
        "null\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_screenshot_is_a_png_that_can_be_read_as_a_blob() {
    let (cluster, token) = cluster(&[]).await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let answer = get(&cluster, &token, &path(&record, "/screenshot")).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let blob = answer.body.as_str().unwrap().to_owned();
    let bytes = cluster.download_until_error(&token, &blob).await;
    assert!(bytes.starts_with(b"\x89PNG\r\n\x1a\n"), "{:?}", &bytes[..8]);
    let kept = get(&cluster, &token, &format!("/blobs/{blob}")).await.body;
    assert_eq!((text(&kept, "state"), &kept["size"]), ("created", &json!(bytes.len())));
    assert_eq!(
        get(&cluster, &token, &path(&record, "/screenshot")).await.body,
        answer.body,
        "the same picture is one blob"
    );
    assert!(cluster.files_in("1/drafts").is_empty() && cluster.files_in("2/drafts").is_empty());
    let messages = cluster.messages(&object(&record)).await;
    assert!(messages.contains(&"screenshot request from REST API".to_owned()), "{messages:?}");
    act(&cluster, &token, &record, "poweroff").await;
    assert_eq!(get(&cluster, &token, &path(&record, "/screenshot")).await.status, 409);
    let young = try_create(&cluster, &token, "young", &json!({})).await.body;
    let why = format!("instance {} is not ready (initial)", text(&young, "uuid"));
    assert_eq!(refusal(&get(&cluster, &token, &path(&young, "/screenshot")).await), (406, why.as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn viewers_get_a_file_that_tells_them_where_the_screen_is() {
    let (cluster, token) = cluster(&[]).await;
    for (vdi, kind) in
        [("spice", "spice"), ("spiceconcurrent", "spice"), ("spicedebug", "spice"), ("vnc", "vnc")]
    {
        let video = json!({"placed_on": "sim-2", "video": {"model": "qxl", "memory": 16384, "vdi": vdi}});
        let record = create(&cluster, &token, vdi, &video).await;
        let answer = get(&cluster, &token, &path(&record, "/vdiconsolehelper")).await;
        assert_eq!(
            (answer.status.as_u16(), answer.headers["content-type"].to_str().unwrap()),
            (200, "application/x-virt-viewer")
        );
        let mut lines = vec![
            "[virt-viewer]".to_owned(),
            format!("type={kind}"),
            "host=127.1.0.3".to_owned(),
            format!("port={}", record["vdi_port"]),
        ];
        if vdi != "vnc" {
            lines.push(format!("tls-port={}", record["vdi_tls_port"]));
            lines.push("host-subject=C=XX,O=Muster,CN=sim-2".into());
        }
        lines.push("delete-this-file=1".into());
        if vdi != "vnc" {
            let pem = "-----BEGIN CERTIFICATE-----\\nc2ltdWxhdGVk\\n-----END CERTIFICATE-----\\n";
            lines.push(format!("ca={pem}"));
        }
        assert_eq!(answer.text, lines.join("\n") + "\n");
    }
    try_create(&cluster, &token, "huge", &json!({"cpus": 500})).await;
    let nowhere = get(&cluster, &token, "/instances/huge/vdiconsolehelper").await;
    assert_eq!(refusal(&nowhere), (404, "placement node not found"));
}

/// Base64 of either alphabet.
fn decode(text: &str) -> Vec<u8> {
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' | b'-' => 62,
            _ => 63,
        };
        (bits, count) = (bits << 6 | u32::from(value), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 0xff) as u8);
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_proxy_gets_a_token_that_the_published_key_verifies() {
    let settings =
        [("KERBSIDE_URL", "https://consoles.example/"), ("ZONE", "lab"), ("KERBSIDE_TOKEN_DURATION", "60")];
    let (cluster, token) = cluster(&settings).await;
    assert!(get(&cluster, "", "/").await.text.contains("vdi-console-proxy"));
    let young = try_create(&cluster, &token, "young", &json!({})).await.body;
    let why = format!("instance {} is not ready (initial)", text(&young, "uuid"));
    assert_eq!(refusal(&get(&cluster, &token, &path(&young, "/vdiconsoleproxy")).await), (406, why.as_str()));
    let vnc = json!({"video": {"model": "vga", "memory": 16384, "vdi": "vnc"}});
    let vnc = create(&cluster, &token, "vnc", &vnc).await;
    let refused = get(&cluster, &token, &path(&vnc, "/vdiconsoleproxy")).await;
    assert_eq!(refusal(&refused), (409, "instance does not have a SPICE console"));
    let record = create(&cluster, &token, "www", &json!({})).await;
    let answer = get(&cluster, &token, &path(&record, "/vdiconsoleproxy")).await;
    assert_eq!((answer.status.as_u16(), answer.body.as_object().unwrap().len()), (200, 2), "{}", answer.text);
    let url = text(&answer.body, "url");
    let jwt = url.strip_prefix("https://consoles.example/sf-console.vv?token=").unwrap();

    let system = cluster.token("system").await;
    let keys = get(&cluster, &system, "/admin/vditokenpubkey").await.body;
    let (signed, signature) = jwt.rsplit_once('.').unwrap();
    let (head, claims) = signed.split_once('.').unwrap();
    let (head, claims): (Value, Value) =
        (serde_json::from_slice(&decode(head)).unwrap(), serde_json::from_slice(&decode(claims)).unwrap());
    assert_eq!((text(&head, "alg"), &head["kid"]), ("EdDSA", &keys["keys"][0]["kid"]));
    let pem: String =
        text(&keys["keys"][0], "pem").lines().filter(|line| !line.starts_with("-----")).collect();
    let der = decode(&pem);
    let public = UnparsedPublicKey::new(&ED25519, &der[der.len() - 32..]);
    public.verify(signed.as_bytes(), &decode(signature)).unwrap();
    assert!(public.verify(b"something else", &decode(signature)).is_err());
    assert_eq!((text(&claims, "iss"), text(&claims, "aud")), ("lab", "https://consoles.example"));
    assert_eq!(claims["exp"], answer.body["expires_at"]);
    assert_eq!(claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap(), 60);
    assert_eq!((&claims["instance_uuid"], &claims["tls_port"]), (&record["uuid"], &record["vdi_tls_port"]));
    let events = cluster.events(&object(&record)).await;
    let event = events.iter().find(|event| event.message == "vdi console token created").unwrap();
    assert_eq!((&event.extra["jti"], &event.extra["kid"]), (&claims["jti"], &head["kid"]));
    assert!(!format!("{events:?}").contains(jwt), "tokens are not told of");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_console_proxy_or_its_key_there_are_no_tokens() {
    let (none, token) = cluster(&[]).await;
    let record = create(&none, &token, "www", &json!({})).await;
    let refused = get(&none, &token, &path(&record, "/vdiconsoleproxy")).await;
    assert_eq!(refusal(&refused), (404, "kerbside integration is not configured"));
    let (keyless, token) =
        cluster(&[("KERBSIDE_URL", "https://x.example"), ("KERBSIDE_SIGNING_KEY", "")]).await;
    let record = create(&keyless, &token, "www", &json!({})).await;
    let refused = get(&keyless, &token, &path(&record, "/vdiconsoleproxy")).await;
    assert_eq!(refused.status, 500);
    assert!(refusal(&refused).1.starts_with("kerbside signing key is not configured"), "{}", refused.text);
    let system = keyless.token("system").await;
    assert_eq!(get(&keyless, &system, "/admin/vditokenpubkey").await.status, 404);
}
