use super::*;

#[test]
fn viewer_file_contains_the_node_address() {
    let file = "[virt-viewer]\ntype=spice\nhost=10.0.0.3\nport=31000\nhost-subject=C=x\n";
    assert_eq!(parse_host(file).as_deref(), Some("10.0.0.3"));
    assert_eq!(parse_host("[virt-viewer]\nhost=\n"), None);
    assert_eq!(parse_host("null"), None);
}

#[test]
fn escape_closes_the_console_only_when_typed() {
    assert_eq!(encode_typed(b"ls\r"), (b"ls\r".to_vec(), false));
    assert_eq!(encode_typed(b"ab\x1dcd"), (b"ab".to_vec(), true));
    assert_eq!(script_lines(b"ab\x1d\n").collect::<Vec<_>>(), [b"ab\x1d\r"]);
}

#[test]
fn script_lines_are_sent_one_by_one() {
    let typed: Vec<Vec<u8>> = script_lines(b"root\n\nls").collect();
    assert_eq!(typed, [&b"root\r"[..], b"\r", b"ls"]);
    assert_eq!(script_lines(b"").count(), 0);
}

/// Opens a console session. Returns it with the guest's side of the connection and a channel for typed keys.
async fn open_console(interactive: bool) -> (ConsoleSession<Vec<u8>>, TcpStream, mpsc::Sender<Vec<u8>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = connect("127.0.0.1", listener.local_addr().unwrap().port()).await.unwrap();
    let (guest, _) = listener.accept().await.unwrap();
    let (keys, input) = mpsc::channel(4);
    let console = ConsoleSession {
        stream,
        telnet: Telnet::default(),
        input,
        out: vec![],
        interactive,
        linger: Duration::from_millis(50),
        raw: None,
        responded: false,
    };
    (console, guest, keys)
}

#[tokio::test]
async fn typed_keys_reach_the_guest_until_the_escape() {
    let (mut console, mut guest, keys) = open_console(true).await;
    let guest = async move {
        // Offers to suppress go-ahead, which the client accepts.
        guest.write_all(b"\xff\xfb\x03login: ").await.unwrap();
        let mut response = [0; 3];
        guest.read_exact(&mut response).await.unwrap();
        keys.send(b"root\r".to_vec()).await.unwrap();
        keys.send(b"ls\x1drest".to_vec()).await.unwrap();
        let mut all = vec![];
        guest.read_to_end(&mut all).await.unwrap();
        (response, all)
    };
    let session = async move {
        let end = console.run().await.unwrap();
        (end, console.out)
    };
    let ((end, shown), (response, all)) = tokio::join!(session, guest);
    assert_eq!((end, shown.as_slice(), &response), (SessionEnd::Left, &b"login: "[..], b"\xff\xfd\x03"));
    assert_eq!(all, b"root\rls");
}

#[tokio::test]
async fn script_ends_when_it_is_sent_and_the_guest_is_silent() {
    let (mut console, mut guest, keys) = open_console(false).await;
    let guest = async move {
        guest.write_all(b"\xff\xfb\x01login: ").await.unwrap();
        keys.send(b"root\n".to_vec()).await.unwrap();
        drop(keys);
        let mut got = [0; 8];
        guest.read_exact(&mut got).await.unwrap();
        guest.write_all(b"# ").await.unwrap();
        (got, guest)
    };
    let session = async {
        let end = console.run().await.unwrap();
        (end, console.out.clone())
    };
    let ((end, shown), (got, _guest)) = tokio::join!(session, guest);
    assert_eq!((end, shown.as_slice(), &got), (SessionEnd::Silent, &b"login: # "[..], b"\xff\xfd\x01root\r"));
}

#[tokio::test]
async fn closed_connection_ends_the_session() {
    let (mut console, guest, _keys) = open_console(true).await;
    drop(guest);
    assert_eq!(console.run().await.unwrap(), SessionEnd::Closed);
}
